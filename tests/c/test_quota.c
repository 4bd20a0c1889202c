/* test_quota.c - processor quotas in files of control groups, and the machine's load, in folders
 * created by the test. */
#define _GNU_SOURCE
#include "system.h"

#include "test.h"

#if defined(__linux__)
#include <limits.h>
#include <sys/stat.h>
#include <unistd.h>

static char root[] = "/tmp/h2o-quota-XXXXXX";

/* Writes a file below the root and creates its folders. */
static void write_file(const char *name, const char *text) {
    char path[512];
    const int length = snprintf(path, sizeof path, "%s/%s", root, name);
    for (int i = (int)strlen(root) + 1; i < length; i++) {
        if (path[i] != '/') continue;
        path[i] = '\0';
        mkdir(path, 0700);
        path[i] = '/';
    }
    FILE *const file = fopen(path, "w");
    CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void version_2(void) {
    CHECK(h2o_quota(root) == INT_MAX); /* no such files */
    write_file("proc/self/cgroup", "0::/pod/app\n");
    CHECK(h2o_quota(root) == INT_MAX);
    write_file("sys/fs/cgroup/pod/app/cpu.max", "max 100000\n");
    CHECK(h2o_quota(root) == INT_MAX);
    write_file("sys/fs/cgroup/pod/app/cpu.max", "350000 100000\n");
    CHECK(h2o_quota(root) == 4);
    write_file("sys/fs/cgroup/pod/cpu.max", "200000 100000\n"); /* a parent group's */
    CHECK(h2o_quota(root) == 2);
    write_file("sys/fs/cgroup/cpu.max", "50000 100000\n"); /* a container's own root */
    CHECK(h2o_quota(root) == 1);
    write_file("sys/fs/cgroup/cpu.max", "max 100000\n");
    write_file("sys/fs/cgroup/pod/cpu.max", "none\n");
    CHECK(h2o_quota(root) == 4);
}

static void version_1(void) {
    write_file("proc/self/cgroup", "5:memory:/pod\n4:cpu,cpuacct:/elsewhere/pod\n0::/\n");
    CHECK(h2o_quota(root) == INT_MAX);
    write_file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "-1\n");
    write_file("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
    CHECK(h2o_quota(root) == INT_MAX);
    write_file("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "200000\n"); /* where the container begins */
    CHECK(h2o_quota(root) == 2);
    write_file("proc/self/cgroup", "no line of this kind\n4:cpu");
    CHECK(h2o_quota(root) == INT_MAX);
}

/* The machine is full if more threads run or wait than it has processors, this one included. */
static void load(void) {
    char line[64];
    CHECK(!h2o_machine_is_full(root)); /* no such file */
    for (long more = 0; more < 2; more++) {
        snprintf(line, sizeof line, "0.50 9.25 1.00 %ld/80 11206\n",
                 sysconf(_SC_NPROCESSORS_ONLN) + more);
        write_file("proc/loadavg", line);
        CHECK(h2o_machine_is_full(root) == (more == 1));
    }
    write_file("proc/loadavg", "no numbers\n");
    CHECK(!h2o_machine_is_full(root));
}

int main(void) {
    CHECK(mkdtemp(root) != NULL);
    version_2();
    version_1();
    load();
    char command[64];
    snprintf(command, sizeof command, "rm -r %s", root);
    CHECK(system(command) == 0);
    return 0;
}

#else

int main(void) { return 0; }

#endif
