/* SPDX-License-Identifier: Apache-2.0 */
/* memcpy whose stores pass the caches by: see copying.py for why. x86-64 only, where SSE2 always is. */

#include <emmintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { LINE = 64 }; /* bytes of a cache line: streaming stores pay only if they fill whole ones */

void isthmus_stream_copy(char *into, const char *from, size_t nbytes) {
    size_t head = -(uintptr_t)into % LINE;
    if (nbytes < head + LINE) {
        memcpy(into, from, nbytes);
        return;
    }
    memcpy(into, from, head);
    for (into += head, from += head, nbytes -= head; nbytes >= LINE; into += LINE, from += LINE, nbytes -= LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)into, a);
        _mm_stream_si128((__m128i *)(into + 16), b);
        _mm_stream_si128((__m128i *)(into + 32), c);
        _mm_stream_si128((__m128i *)(into + 48), d);
    }
    memcpy(into, from, nbytes);
    _mm_sfence(); /* nobody may hear of the bytes before they are there */
}
