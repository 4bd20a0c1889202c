/* test_driver.c - many threads open the driver, load the kernels of several devices, and launch,
 * all at once. ThreadSanitizer reports races between them (make tsan). */
#define _POSIX_C_SOURCE 200809L /* barriers */
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>
#include <stdatomic.h>

#include "children.h"
#include "cuda/driver.h"

enum { DEVICES = 4, THREADS = 8, LATE = 4, TURNS = 200 };

static pthread_barrier_t start;
static atomic_int refused, finished;

static void launch_once(int device) {
    static const int params = 0;
    const cuda_launch launch = {0, &params, sizeof params, {1, 1, 1}, 32, 0};
    h2o_error error = {0};
    cuda_scope scope;
    int status = cuda_enter(device, &scope, &error);
    if (status != H2O_OK) { /* happens once, on the last device; the next call tries again */
        CHECK(device == DEVICES - 1 && status == H2O_EMEMORY);
        CHECK(strstr(error.text, "cuModuleLoadData: CUDA error 2") != NULL);
        atomic_fetch_add(&refused, 1);
        status = cuda_enter(device, &scope, &error);
    }
    CHECK(status == H2O_OK && scope.kernels != NULL);
    CHECK(cuda_start(&scope, &launch, NULL, NULL, &error) == H2O_OK);
    cuda_leave(&scope);
    const cuda_plan plan = {.capability = 1, .count = 1, .launch = {launch}};
    CHECK(cuda_has(device, &plan));
}

static void *work(void *argument) {
    const int number = (int)(intptr_t)argument;
    static const char image[] = "any";
    h2o_error error = {0};
    h2o_device_facts facts;
    int version, devices;
    pthread_barrier_wait(&start);
    CHECK(cuda_open(&version, &devices, &error) == H2O_OK && devices == DEVICES);
    CHECK(cuda_describe(number % DEVICES, &facts, &error) == H2O_OK);
    CHECK(cuda_take_image(image, sizeof image, &error) == H2O_OK);
    for (int i = 0; i < TURNS; i++) launch_once((number + i) % DEVICES);
    atomic_fetch_add_explicit(&finished, 1, memory_order_relaxed);
    return NULL;
}

/* These threads begin when everything is loaded, and have waited for no lock. */
static void *work_late(void *argument) {
    const int number = (int)(intptr_t)argument;
    const struct timespec moment = {0, 1000000};
    while (atomic_load_explicit(&finished, memory_order_relaxed) < THREADS)
        nanosleep(&moment, NULL);
    for (int i = 0; i < TURNS; i++) launch_once((number + i) % DEVICES);
    return NULL;
}

static void *load_first(void *unused) {
    h2o_error error = {0};
    CHECK(cuda_take_image("any", 4, &error) == H2O_OK);
    launch_once(0);
    return unused;
}

/* The child must take a lock that a loading thread of the parent held during the fork. */
static void a_fork_during_a_load_does_not_hang(const atomic_int *loads) {
    h2o_error error = {0};
    pthread_t thread;
    if (!can_fork_threads()) return;
    CHECK(pthread_create(&thread, NULL, load_first, NULL) == 0);
    while (atomic_load(&loads[0]) == 0) continue;
    const pid_t child = fork();
    if (child == 0) {
        alarm(10); /* a child that hangs fails */
        _exit(cuda_take_image("any", 4, &error) == H2O_OK ? 0 : 1);
    }
    CHECK(wait_for(child) == 0);
    pthread_join(thread, NULL);
}

int main(void) {
    pthread_t threads[THREADS + LATE];
    void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    CHECK(driver != NULL);
    const atomic_int *const loads = dlsym(driver, "loads");
    a_fork_during_a_load_does_not_hang(loads);
    const int before = *(const atomic_int *)dlsym(driver, "launches");
    pthread_barrier_init(&start, NULL, THREADS);
    for (int i = 0; i < THREADS + LATE; i++) {
        void *(*const start_here)(void *) = i < THREADS ? work : work_late;
        CHECK(pthread_create(&threads[i], NULL, start_here, (void *)(intptr_t)i) == 0);
    }
    for (int i = 0; i < THREADS + LATE; i++) pthread_join(threads[i], NULL);

    const atomic_int *const launches = dlsym(driver, "launches");
    for (int device = 0; device < DEVICES; device++) {
        CHECK(loads[device] == 1 + (device == DEVICES - 1)); /* each device's kernels once */
        const int first = device == 0 ? before : 0;
        CHECK(launches[device] == first + (THREADS + LATE) * TURNS / DEVICES);
    }
    CHECK(*(const atomic_int *)dlsym(driver, "strangers") == 0);
    CHECK(*(const atomic_int *)dlsym(driver, "unloads") == 0);
    CHECK(refused == 1);
    puts("driver: ok");
    return 0;
}
