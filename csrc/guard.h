/* guard.h - gaps between the parts of a workspace, for AddressSanitizer.
 *
 * A workspace is one block of memory, so AddressSanitizer would not notice a write past the end
 * of one part into the next. In builds with AddressSanitizer each part is therefore followed by a
 * gap that must not be touched. Other builds have no gaps. */
#ifndef H2O_GUARD_H
#define H2O_GUARD_H

#include <stddef.h>

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1 /* as gcc defines it */
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
enum { GUARD_BYTES = 64 };
#ifdef __cplusplus
extern "C" {
#endif
void __asan_poison_memory_region(const volatile void *memory, size_t bytes);
void __asan_unpoison_memory_region(const volatile void *memory, size_t bytes);
#ifdef __cplusplus
}
#endif

/* Makes memory usable again, including the gaps of its earlier parts. */
static inline void guard_open(void *memory, size_t bytes) {
    __asan_unpoison_memory_region(memory, bytes);
}

/* Forbids access to the gap after a part that ends here. */
static inline void guard_close(void *end) { __asan_poison_memory_region(end, GUARD_BYTES); }
#else
enum { GUARD_BYTES = 0 };
static inline void guard_open(void *memory, size_t bytes) { (void)memory, (void)bytes; }
static inline void guard_close(void *end) { (void)end; }
#endif

#endif
