/* system.c - functions that depend on the operating system: see system.h. */
#define _GNU_SOURCE /* dl_iterate_phdr, madvise, sched_getaffinity, syscall */
#include "system.h"

#include <limits.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(_WIN32)
#include <malloc.h>
#include <windows.h>
#else
#include <dlfcn.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <link.h>
#include <linux/futex.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#elif defined(__APPLE__)
#include <mach-o/dyld.h>
#include <sys/sysctl.h>
#endif

/* ---- Threads ----------------------------------------------------------- */

int64_t h2o_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static bool start_detached(void *(*function)(void *)) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, function, NULL) != 0) return false;
    pthread_detach(thread);
    return true;
}

#if defined(_WIN32)

void h2o_wait(const void *word, uint32_t value) { (void)word, (void)value, SwitchToThread(); }

void h2o_wake_all(const void *word) { (void)word; }

bool h2o_start_thread(void *(*function)(void *)) { return start_detached(function); }

int h2o_processors(void) {
    DWORD_PTR usable = 0, all = 0;
    const BOOL known = GetProcessAffinityMask(GetCurrentProcess(), &usable, &all);
    const int count = known ? __builtin_popcountll(usable) : 0; /* of one group, at most 64 */
    return count > 0 ? count : 1;
}

void h2o_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    (void)before, (void)in_parent, (void)in_child;
}

#else

#if defined(__linux__)
void h2o_wait(const void *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

void h2o_wake_all(const void *word) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
void h2o_wait(const void *word, uint32_t value) { (void)word, (void)value, sched_yield(); }

void h2o_wake_all(const void *word) { (void)word; }
#endif

bool h2o_start_thread(void *(*function)(void *)) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = start_detached(function);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return started;
}

int h2o_processors(void) {
    int count = 0;
#if defined(__linux__)
    cpu_set_t processors;
    if (sched_getaffinity(0, sizeof processors, &processors) == 0) count = CPU_COUNT(&processors);
#elif defined(__APPLE__)
    size_t size = sizeof count; /* waiting for a slow processor would hold up the fast ones */
    if (sysctlbyname("hw.perflevel0.logicalcpu", &count, &size, NULL, 0) != 0) count = 0;
#endif
    if (count < 1) count = (int)sysconf(_SC_NPROCESSORS_ONLN);
    const int quota = h2o_quota("");
    return count < 1 ? 1 : count < quota ? count : quota;
}

void h2o_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void)) {
    pthread_atfork(before, in_parent, in_child);
}

#endif

/* ---- A container's quota, and the machine's load -------------------------- */

#if defined(__linux__)

enum { PATH = 4096 };

/* Reads two positive numbers: from one file of a folder, or one each from two files. */
static bool read_two(const char *folder, const char *first, const char *second, double x[2]) {
    int found = 0;
    for (int i = 0; i < (second ? 2 : 1); i++) {
        char path[PATH];
        const int length = snprintf(path, sizeof path, "%s/%s", folder, i == 0 ? first : second);
        FILE *const file = length < PATH ? fopen(path, "re") : NULL;
        if (!file) return false;
        found += fscanf(file, "%lf %lf", &x[i], &x[1]) == (second ? 1 : 2) ? 1 : 0;
        fclose(file);
    }
    return found == (second ? 2 : 1) && x[0] > 0.0 && x[1] > 0.0;
}

/* The processors that a control group and its ancestors grant: the least of their quotas. */
static double least_quota(const char *mount, const char *group, bool version_2) {
    char folder[PATH];
    double least = INFINITY;
    if (snprintf(folder, sizeof folder, "%s%s", mount, group) >= PATH) return least;
    for (;;) {
        double x[2]; /* processor time, and the period for which it is granted */
        const bool known = version_2 ? read_two(folder, "cpu.max", NULL, x)
                                     : read_two(folder, "cpu.cfs_quota_us", "cpu.cfs_period_us", x);
        if (known) least = fmin(least, x[0] / x[1]);
        char *const slash = strrchr(folder, '/');
        if (slash < folder + strlen(mount)) return least;
        *slash = '\0';
    }
}

/* Parses a line of /proc/self/cgroup, number:controllers:path. Version 2 has no controllers. */
static double quota_of_line(const char *root, char *line) {
    char mount[PATH];
    char *const controllers = strchr(line, ':');
    char *const group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group) return INFINITY;
    *group = '\0';
    group[1 + strcspn(group + 1, "\n")] = '\0';
    const bool version_2 = controllers[1] == '\0';
    const bool cpu = strcmp(controllers, ":cpu") == 0 || strncmp(controllers, ":cpu,", 5) == 0 ||
                     strcmp(controllers, ":cpuacct,cpu") == 0;
    if (!version_2 && !cpu) return INFINITY;
    if (snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, version_2 ? "" : "/cpu") >=
        PATH) {
        return INFINITY;
    }
    return least_quota(mount, group + 1, version_2);
}

int h2o_quota(const char *root) {
    char line[PATH];
    double least = INFINITY;
    if (snprintf(line, sizeof line, "%s/proc/self/cgroup", root) >= PATH) return INT_MAX;
    FILE *const file = fopen(line, "re");
    while (file && fgets(line, sizeof line, file)) least = fmin(least, quota_of_line(root, line));
    if (file) fclose(file);
    return least < INT_MAX ? (int)ceil(least) : INT_MAX;
}

/* The fourth field of loadavg counts the threads that run or wait, the caller among them. */
bool h2o_machine_is_full(const char *root) {
    char path[PATH];
    long runnable = 0;
    if (snprintf(path, sizeof path, "%s/proc/loadavg", root) >= PATH) return false;
    FILE *const file = fopen(path, "re");
    if (!file) return false;
    const bool found = fscanf(file, "%*f %*f %*f %ld/", &runnable) == 1;
    fclose(file);
    return found && runnable > sysconf(_SC_NPROCESSORS_ONLN);
}

#else

int h2o_quota(const char *root) {
    (void)root;
    return INT_MAX;
}

bool h2o_machine_is_full(const char *root) { return (void)root, false; }

#endif

/* ---- Features of the processor ------------------------------------------- */

/* Linux saves the tiles only for a process that has requested them: 8 KiB per thread. */
bool h2o_may_use_tiles(void) {
#if defined(__linux__) && defined(__x86_64__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

#if defined(__aarch64__) && (defined(__linux__) || defined(__APPLE__))

static const struct {
    const char *name, *apple;
    int words, bit; /* 1: AT_HWCAP of Linux, 2: AT_HWCAP2; and the bit in it */
} arm_features[] = {{"dotprod", "hw.optional.arm.FEAT_DotProd", 1, 20},
                    {"i8mm", "hw.optional.arm.FEAT_I8MM", 2, 13},
                    {"bf16", "hw.optional.arm.FEAT_BF16", 2, 14}};

static bool has_arm_feature(size_t i) {
#if defined(__linux__)
    return getauxval(arm_features[i].words == 1 ? AT_HWCAP : AT_HWCAP2) >> arm_features[i].bit & 1;
#else
    int has = 0;
    size_t size = sizeof has;
    return sysctlbyname(arm_features[i].apple, &has, &size, NULL, 0) == 0 && has;
#endif
}

bool h2o_arm_has(const char *feature) {
    for (size_t i = 0; i < sizeof arm_features / sizeof *arm_features; i++) {
        if (strcmp(arm_features[i].name, feature) == 0) return has_arm_feature(i);
    }
    return false;
}

#else

bool h2o_arm_has(const char *feature) { return (void)feature, false; }

#endif

/* ---- Libraries --------------------------------------------------------- */

#if defined(_WIN32)

uint64_t h2o_library_loads(void) { return 0; }

void *h2o_loaded_library(const char *name) {
    HMODULE library = NULL;
    if (strncmp(name, "lib", 3) == 0) name += 3;
    return GetModuleHandleExA(0, name, &library) ? (void *)library : NULL;
}

void *h2o_open_library(const char *windows, const char *other, const char **reason) {
    void *const library = (void *)LoadLibraryExA(windows, NULL, LOAD_LIBRARY_SEARCH_SYSTEM32);
    (void)other;
    *reason = library != NULL ? "" : "it is not in the folder of Windows' own libraries";
    return library;
}

void h2o_close_library(void *library) { FreeLibrary(library); }

static void *address_of(void *library, const char *symbol) {
    const FARPROC function = GetProcAddress(library, symbol);
    void *address;
    memcpy(&address, &function, sizeof address);
    return address;
}

#else

#if defined(__APPLE__)

uint64_t h2o_library_loads(void) { return _dyld_image_count(); }

#else

static int count_loads(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    *(uint64_t *)context = info->dlpi_adds;
    return 1; /* stop: every library reports the same count */
}

uint64_t h2o_library_loads(void) {
    uint64_t loads = 0;
    dl_iterate_phdr(count_loads, &loads);
    return loads;
}

#endif

typedef struct {
    const char *name;
    char path[4096]; /* empty if none is found */
} search;

/* Notes a library's path if its name is the wanted one. */
static void visit(search *wanted, const char *path) {
    const char *const slash = strrchr(path, '/');
    const char *const file = slash ? slash + 1 : path;
    const size_t length = strlen(wanted->name);
    const bool same = strncmp(file, wanted->name, length) == 0;
    if (same && (file[length] == '.' || file[length] == '-') &&
        strlen(path) < sizeof wanted->path) {
        strcpy(wanted->path, path);
    }
}

#if defined(__APPLE__)

static void visit_all(search *wanted) {
    for (uint32_t i = 0; i < _dyld_image_count(); i++) {
        const char *const path = _dyld_get_image_name(i);
        if (path != NULL) visit(wanted, path);
    }
}

#else

static int visit_one(struct dl_phdr_info *info, size_t size, void *context) {
    (void)size;
    visit(context, info->dlpi_name);
    return 0;
}

/* The loader's lock is held during the iteration, so dlopen must wait until it has returned. */
static void visit_all(search *wanted) { dl_iterate_phdr(visit_one, wanted); }

#endif

void *h2o_loaded_library(const char *name) {
    search wanted = {.name = name};
    visit_all(&wanted);
    return wanted.path[0] ? dlopen(wanted.path, RTLD_NOLOAD | RTLD_LAZY) : NULL;
}

void *h2o_open_library(const char *windows, const char *other, const char **reason) {
    void *const library = dlopen(other, RTLD_NOW | RTLD_LOCAL);
    (void)windows;
    *reason = library != NULL ? "" : dlerror();
    return library;
}

void h2o_close_library(void *library) { dlclose(library); }

static void *address_of(void *library, const char *symbol) { return dlsym(library, symbol); }

#endif

/* POSIX lets an object pointer hold a function's address; ISO C has no cast for that. */
bool h2o_find_symbol(void *library, const char *symbol, void *function) {
    void *const address = library != NULL ? address_of(library, symbol) : NULL;
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

/* ---- Memory ------------------------------------------------------------ */

#if defined(_WIN32)

void *h2o_allocate(size_t alignment, size_t bytes) { return _aligned_malloc(bytes, alignment); }

void h2o_free(void *memory) { _aligned_free(memory); }

void *h2o_map(size_t alignment, size_t bytes) { return h2o_allocate(alignment, bytes); }

void h2o_unmap(void *memory, size_t bytes) {
    (void)bytes;
    h2o_free(memory);
}

#else

void *h2o_allocate(size_t alignment, size_t bytes) { return aligned_alloc(alignment, bytes); }

void h2o_free(void *memory) { free(memory); }

/* A mapping begins at a page. For larger alignments, maps more and unmaps both ends. */
void *h2o_map(size_t alignment, size_t bytes) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), more = alignment > page ? alignment : 0;
    const size_t total = bytes + more;
    char *const mapped =
        mmap(NULL, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return NULL;
    const size_t before = more ? -(uintptr_t)mapped & (more - 1) : 0;
    if (before > 0) munmap(mapped, before);
    if (more > before) munmap(mapped + before + bytes, more - before);
    return mapped + before;
}

void h2o_unmap(void *memory, size_t bytes) { munmap(memory, bytes); }

#endif

void h2o_prefer_huge_pages(void *memory, size_t bytes) {
#if defined(__linux__)
    madvise(memory, bytes, MADV_HUGEPAGE); /* only advice: the memory works without it */
#else
    (void)memory, (void)bytes;
#endif
}
