/* system.h - functions that depend on the operating system: threads, forks, loaded libraries and
 * memory.
 *
 * Supports Linux, macOS and Windows. POSIX mutexes and conditions need no wrappers: every compiler
 * with which the core is built provides them, MinGW's included. */
#ifndef H2O_SYSTEM_H
#define H2O_SYSTEM_H

#if defined(__MINGW32__) && defined(__x86_64__) && !defined(__clang__)
#error "MinGW's gcc does not align vectors on the stack (GCC bug 54412): use clang for MinGW"
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Threads ----------------------------------------------------------- */

/* Sleeps while *word equals value, until h2o_wake_all for the word; may return early. On Linux the
 * thread really sleeps, so the scheduler prefers it when it wakes. On other systems it only yields,
 * and on a busy machine waits for all other threads. */
void h2o_wait(const void *word, uint32_t value);
void h2o_wake_all(const void *word);

/* Nanoseconds of a clock that is never set back. */
int64_t h2o_now(void);

/* Starts a thread that is never joined and that leaves signals to the application's threads. False
 * if no thread can be started. */
bool h2o_start_thread(void *(*function)(void *));

/* Number of processors that this process may use, on Apple's only the fast cores; at least 1. */
int h2o_processors(void);

/* Number of processors whose time a container (Linux control groups, version 1 or 2) grants this
 * process, rounded up; INT_MAX if there is no quota. root is put before /proc and /sys; only tests
 * pass anything but "". */
int h2o_quota(const char *root);

/* Whether at least as many other threads as the machine has processors run or wait for one. False on
 * systems that do not tell. root: see h2o_quota. */
bool h2o_machine_is_full(const char *root);

/* Registers functions to call around each fork, on systems that have it: before it in the parent,
 * after it in the parent and in the child. */
void h2o_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));

/* Whether programs on this system can use AMX tiles, as far as h2o knows. */
#if defined(__linux__)
#define H2O_SYSTEM_TILES 1
#else
#define H2O_SYSTEM_TILES 0
#endif

/* Requests the use of tiles for this process. Returns whether it may use them. */
bool h2o_may_use_tiles(void);

/* Whether the system reports that this aarch64 processor has "dotprod", "bf16" or "i8mm". Programs
 * cannot query the processor itself. False on systems that do not report features. */
bool h2o_arm_has(const char *feature);

/* ---- Libraries --------------------------------------------------------- */

/* A number that changes when a library is loaded; always 0 if the system has no such count. */
uint64_t h2o_library_loads(void);

/* The loaded library whose file has this name up to a dot or dash, or NULL: "libgomp" stands for
 * libgomp.so.1 and libgomp-a34b3233.so.1. It stays loaded. On Windows the name is without "lib". */
void *h2o_loaded_library(const char *name);

/* Opens a library by its name on Windows or on other systems. Returns NULL if that fails, and sets
 * *reason. The library may be closed again. */
void *h2o_open_library(const char *windows, const char *other, const char **reason);
void h2o_close_library(void *library);

/* Sets *function, a function pointer, to the address of a library's symbol; NULL if the library is
 * NULL or lacks it. Returns whether it was found. */
bool h2o_find_symbol(void *library, const char *symbol, void *function);

/* ---- Memory ------------------------------------------------------------ */

/* Memory aligned to `alignment`, which must divide bytes; NULL if there is none. */
void *h2o_allocate(size_t alignment, size_t bytes);
void h2o_free(void *memory);

/* Memory directly from the system, to which h2o_unmap returns it at once. */
void *h2o_map(size_t alignment, size_t bytes);
void h2o_unmap(void *memory, size_t bytes);

/* Asks for huge pages for such memory, if programs may. */
void h2o_prefer_huge_pages(void *memory, size_t bytes);

#endif
