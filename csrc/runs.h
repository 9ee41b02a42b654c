// Runs of sixteen tokens, at multiples of sixteen: location of their keys and values, and prefetching. See level.cpp.
#pragma once

constexpr int64_t RUN_ROOM = 2 * RUN * MAX_DIM;

// Keys and values of a run of one head, token after token, and equal amounts of each to prefetch meanwhile.
struct Run {
    const bf16 *keys, *values, *next_keys, *next_values;
};

// Returns the address of a token's key.
INLINE const bf16* key_of(const Attention& a, int64_t row, int64_t head, int64_t token) {
    const int64_t size = a.pages.page_tokens;
    const bf16* page = a.pages.base + (a.table + row * a.table_stride)[token / size] * a.pages.page_stride;
    return page + (head * size + token % size) * a.pages.row;
}

// Locates tokens [t, t + RUN) of a head of a piece. Copies them to `room` when they are not contiguous, and when they
// are codes.
INLINE Run find(const Attention& a, const Piece& p, int64_t head, int64_t t, bf16* room) {
    const int64_t dim = a.pages.dim;
    const bool codes = a.pages.format != KVFormat::bf16;
    const bool whole = a.pages.page_tokens % RUN == 0 && t >= p.begin && t + RUN <= p.end;
    if (whole && !codes) {
        const bf16* keys = key_of(a, p.row, head, t);
        return {keys, keys + a.pages.value_offset, keys, keys + a.pages.value_offset};
    }
    const auto nearest = [&](int64_t token) { return token < p.begin ? p.begin : token >= p.end ? p.end - 1 : token; };
    const bf16* keys = key_of(a, p.row, head, nearest(t));
    for (int64_t i = 0; i < RUN; i++) {
        const bf16* key = whole ? keys + i * a.pages.row : key_of(a, p.row, head, nearest(t + i));
        if (codes) {
            load_codes(key, dim, a.pages.format, room + i * dim);
            load_codes(key + a.pages.value_offset, dim, a.pages.format, room + (RUN + i) * dim);
            continue;
        }
        memcpy(room + i * dim, key, sizeof(bf16) * dim);
        memcpy(room + (RUN + i) * dim, key + a.pages.value_offset, sizeof(bf16) * dim);
    }
    return {room, room + RUN * dim, keys, keys + a.pages.value_offset};
}

// Prefetches 64 bytes. The barrier keeps the compiler from moving several prefetches together.
INLINE void ask(const bf16* at) {
    asm volatile("" ::: "memory");
    __builtin_prefetch(at, 0, NEAREST);
}

// The same, while `now` is read. If prefetches target the second level, also prefetches 2 KB ahead of `now` to the
// first.
INLINE void ask_beside(const bf16* at, const bf16* now) {
    ask(at);
    if (NEAREST < 3) __builtin_prefetch(now + 1024, 0, 3);
}

// Prefetches `lines` cache lines and advances `at` past them.
INLINE void ask_lines(const bf16*& at, int64_t lines) {
    for (; lines > 0; lines--, at += 32) ask(at);
}

// Prefetches a whole run of a head.
INLINE void ask_run(const bf16* at, int64_t row) {
    for (int64_t i = 0; i < RUN * row; i += 32) ask(at + i);
}
