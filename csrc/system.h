/* system.h - what operating systems do differently: threads, forks, loaded libraries, memory.
 *
 * Linux, macOS and Windows. POSIX mutexes and conditions are no such thing: all compilers that the
 * core is built with bring them, MinGW's too. */
#ifndef H2O_SYSTEM_H
#define H2O_SYSTEM_H

#if defined(__MINGW32__) && defined(__x86_64__) && !defined(__clang__)
#error "MinGW's gcc does not align vectors on the stack (GCC bug 54412): use clang for MinGW"
#endif

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Threads ----------------------------------------------------------- */

/* Sleeps while the word is that value, until h2o_wake_all for the word, or for a while: it may return at
 * any time. Who sleeps on Linux is preferred when it wakes; who only yields to busy processes waits
 * for all of them. Elsewhere it yields. */
void h2o_wait(const void *word, uint32_t value);
void h2o_wake_all(const void *word);

/* Nanoseconds of a clock that is never set back. */
int64_t h2o_now(void);

/* A thread that is never joined, and that leaves signals to the application's. False where none is to
 * be had. */
bool h2o_start_thread(void *(*function)(void *));

/* Processors that this process may use, on Apple's those made for speed; at least 1. */
int h2o_processors(void);

/* Processors whose time a container (Linux's control groups, version 1 or 2) grants this process,
 * rounded up; INT_MAX without a quota. root: what stands before /proc and /sys, "" but in tests. */
int h2o_quota(const char *root);

/* What is called around each fork, where the system has that: before it in the parent, after it in
 * the parent and in the child. */
void h2o_at_fork(void (*before)(void), void (*in_parent)(void), void (*in_child)(void));

/* Whether this system lets programs use the tiles of AMX, as far as is known here. */
#if defined(__linux__)
#define H2O_SYSTEM_TILES 1
#else
#define H2O_SYSTEM_TILES 0
#endif

/* Whether this process may use them, if the processor has them; asks for them. */
bool h2o_may_use_tiles(void);

/* Whether the system says that this aarch64 processor has "dotprod", "bf16" or "i8mm", which programs
 * may not ask the processor itself; false where systems do not say. */
bool h2o_arm_has(const char *feature);

/* ---- Libraries --------------------------------------------------------- */

/* A number that changes when a library is loaded; 0 where the system does not count. */
uint64_t h2o_library_loads(void);

/* The library among those loaded whose file has this name up to a dot or dash, or NULL: "libgomp" for
 * libgomp.so.1 and libgomp-a34b3233.so.1. It stays loaded. Windows leaves out "lib". */
void *h2o_loaded_library(const char *name);

/* Opens a library by its name on Windows, or on any other system. NULL where it cannot be opened,
 * and *reason then says why. It may be closed again. */
void *h2o_open_library(const char *windows, const char *other, const char **reason);
void h2o_close_library(void *library);

/* Sets *function, a pointer to one, to what a library calls symbol, if it has that; NULL has
 * nothing. */
bool h2o_find_symbol(void *library, const char *symbol, void *function);

/* ---- Memory ------------------------------------------------------------ */

/* Memory at a multiple of alignment, which divides bytes; NULL where there is none. */
void *h2o_allocate(size_t alignment, size_t bytes);
void h2o_free(void *memory);

/* Memory of so many bytes from the system itself, which has it back at once. */
void *h2o_map(size_t alignment, size_t bytes);
void h2o_unmap(void *memory, size_t bytes);

/* Asks for huge pages behind such memory, where programs may. */
void h2o_prefer_huge_pages(void *memory, size_t bytes);

#endif
