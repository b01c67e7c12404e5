/* The optimizer steps, written once over the vector operations of the including file (update_avx512.c, ...):
 *
 *   V, N                              vector of N floats
 *   ld st stream set1                 unaligned load and store; non-temporal store to an address modulo 4*N
 *   add sub mul dvd fma neg root      IEEE single; fma(a, b, c) = a*b + c in one rounding
 *   larger                            torch.maximum: NaN wins
 *   std_max                           std::max(x, v) of torch's scalar tails: v if it is larger, x if one is NaN
 *   rsqrt rsqrt14                     estimates of 1/sqrt(x) of 12 and of 14 bits
 *   rare                              which lanes are not among the n numbers from float(first) on, by their bits
 *   any pick small special            of such lanes: is there one, blend; x < 2^-96; zero, infinity, NaN or negative
 *   ld_bf16 ld_f16 stream_bf16 ...    N 16-bit elements from and to memory, to nearest even
 *   round_bf16 round_f16              to the narrower type and back
 *
 * Orders of roundings are explained in docs/understand/updater.md; each line that looks as if it could be written
 * shorter is as it is because torch rounds there.
 */
#define INLINE static inline __attribute__((always_inline))

/* Positions of one vector: everything a step reads and writes. */
typedef struct at {
    const float *p, *m, *v, *x;
    const void *g;
    const float *root; /* FCU_SQRT_CALL: the square roots, computed before */
    float *p1, *m1, *v1, *x1;
    uint16_t *low;
} at;

/* -- square roots that a vendor's library forms from an estimate (docs/understand/updater.md) ---------------- */

/* s and h approach sqrt(a) and 1 / (2 sqrt(a)) together (Goldschmidt), then a residual step, with single operations. */
INLINE V root_rsqrt(V a)
{
    V y = rsqrt(a), half = set1(0.5f), s = mul(a, y), h = mul(y, half), e = sub(half, mul(s, h));
    s = add(mul(s, e), s), h = add(mul(e, h), h);
    s = add(mul(sub(a, mul(s, s)), h), s);
    M other = rare(a, 0x00800000, 0x7f7ff000 - 0x00800000 + 1);
    return __builtin_expect(any(other), 0) ? pick(other, root(a), s) : s;
}

/* One fused step from an estimate that is better by two bits: s = s + h (a - s s), s + s (1/2 - s h), s/2 (3 - s y). */
INLINE V estimated(V a, const int how)
{
    V y = rsqrt14(a), half = set1(0.5f), s = mul(a, y), h = mul(y, half);
    if (how == FCU_SQRT_RSQRT14_COUPLED)
        return fma_(s, fma_(neg(s), h, half), s);
    if (how == FCU_SQRT_RSQRT14_NEWTON)
        return mul(mul(half, s), fma_(neg(s), y, set1(3.0f)));
    return fma_(fma_(neg(s), s, a), h, s);
}

/* Arguments whose residual would be a denormal number are scaled. */
INLINE V root_rsqrt14(V a, const int how)
{
    V s = estimated(a, how);
    M other = rare(a, 0x0f800000, 0x7f800000 - 0x0f800000);
    if (__builtin_expect(any(other), 0)) {
        V scaled = mul(estimated(mul(a, set1(0x1p96f)), how), set1(0x1p-48f));
        s = pick(small(a), scaled, s);
        s = pick(special(a), root(a), s);
    }
    return s;
}

INLINE V root_by(V a, const int how)
{
    switch (how) {
    case FCU_SQRT_RSQRT: return root_rsqrt(a);
    case FCU_SQRT_RSQRT14: return root_rsqrt14(a, FCU_SQRT_RSQRT14);
    case FCU_SQRT_RSQRT14_COUPLED: return root_rsqrt14(a, FCU_SQRT_RSQRT14_COUPLED);
    case FCU_SQRT_RSQRT14_NEWTON: return root_rsqrt14(a, FCU_SQRT_RSQRT14_NEWTON);
    default: return root(a);
    }
}

/* -- a step ------------------------------------------------------------------------------------------------ */

/* What a step computes. All of it is stored at the end: the memory is faster when the stores come together. */
typedef struct next { V p, m, v, x; } next;

INLINE void put(V x, float *to, const int nt)
{
    if (nt)
        stream(to, x);
    else
        st(to, x);
}

INLINE void put_low(const fcu_rule *r, V x, uint16_t *to, const int nt)
{
    if (r->low == FCU_BF16)
        st_bf16(to, x, nt);
    else
        st_f16(to, x, nt);
}

/* What the optimizer sees of a gradient that arrived as x. */
INLINE V prepared(const fcu_rule *r, V x, const int grad)
{
    if (__builtin_expect(r->ops != 0, 0)) {
        if (r->ops & FCU_DIVIDE)
            x = dvd(x, set1(r->divisor));
        if (r->ops & FCU_TIMES)
            x = mul(x, set1(r->divisor));
        if (grad != FCU_F32 && r->ops & (FCU_DIVIDE | FCU_TIMES))
            x = grad == FCU_BF16 ? round_bf16(x) : round_f16(x);
        if (r->ops & FCU_UNSCALE)
            x = mul(x, set1(r->scale));
        if (r->ops & FCU_UNSCALE_DIV)
            x = dvd(x, set1(r->scale));
        if (r->ops & FCU_CLIP)
            x = mul(x, set1(r->clip));
        if (r->ops & FCU_NEGATE)
            x = neg(x);
    }
    return x;
}

INLINE V gradient(const fcu_rule *r, const void *g, const int grad)
{
    return prepared(r, grad == FCU_F32 ? ld((const float *)g) : grad == FCU_BF16 ? ld_bf16(g) : ld_f16(g), grad);
}

/* Second moment after this step; g is final. odd: the scalar tail of torch-cpu-fused. */
INLINE V second(const fcu_rule *r, V v, V g, const int order, const int odd)
{
    V omb2 = set1(r->omb2), beta2 = set1(r->beta2);
    if (order == FCU_TORCH_CPU)
        return odd ? fma_(v, beta2, mul(mul(omb2, g), g)) : fma_(mul(omb2, g), g, mul(v, beta2));
    V q = mul(g, g);
    if (order == FCU_CUDA_FUSED)
        return fma_(beta2, v, fma_(neg(beta2), q, q));
    return r->omb2_is_one ? fma_(g, g, mul(v, beta2)) : fma_(omb2, q, mul(v, beta2));
}

INLINE next adam_at(const fcu_rule *r, const at *a, const int order, const int how, const int grad, const int odd)
{
    V g = gradient(r, a->g, grad), p = ld(a->p), m = ld(a->m), v = ld(a->v), s, d;
    if (r->decay == 1)
        g = fma_(p, set1(r->weight_decay), g);
    else if (r->decay == 2)
        p = order == FCU_CUDA_FUSED ? fma_(neg(set1(r->weight_decay)), p, p) : mul(p, set1(r->weight_decay));
    if (order == FCU_CUDA_FUSED)
        m = fma_(set1(r->beta1), m, fma_(neg(set1(r->beta1)), g, g));
    else
        m = fma_(set1(r->w1), sub(g, m), r->lerp_far ? g : m);
    v = second(r, v, g, order, odd);
    V x = s = !r->amsgrad ? v : odd ? std_max(ld(a->x), v) : larger(ld(a->x), v);
    s = how == FCU_SQRT_CALL ? ld(a->root) : root_by(s, how);
    d = add(dvd(s, set1(r->bc2_sqrt)), set1(r->eps));
    if (order == FCU_TORCH_CPU)
        p = add(p, dvd(mul(set1(r->step), m), d));
    else if (order == FCU_CUDA_FUSED)
        p = sub(p, dvd(mul(set1(r->step), m), d));
    else
        p = fma_(set1(r->step), dvd(m, d), p);
    return (next){ p, m, v, x };
}

INLINE next sgd_at(const fcu_rule *r, const at *a, const int grad, const int odd)
{
    V g = gradient(r, a->g, grad), p = ld(a->p), m = g;
    if (r->decay)
        g = fma_(p, set1(r->weight_decay), g);
    if (r->momentum_state) {
        m = g;
        if (r->momentum_state == 2) {
            m = ld(a->m);
            m = odd ? fma_(m, set1(r->momentum), mul(g, set1(r->undamped)))
                    : fma_(g, set1(r->undamped), mul(m, set1(r->momentum)));
        }
        g = r->nesterov ? fma_(m, set1(r->momentum), g) : m;
    }
    p = fma_(g, set1(r->step), p);
    return (next){ p, m, m, m };
}

INLINE next one(const fcu_rule *r, const at *a, const int sgd, const int order, const int how, const int grad,
                const int odd)
{
    return sgd ? sgd_at(r, a, grad, odd) : adam_at(r, a, order, how, grad, odd);
}

INLINE void store(const fcu_rule *r, const at *a, const next *n, const int sgd, const int nt)
{
    put(n->p, a->p1, nt);
    if (!sgd || r->momentum_state)
        put(n->m, a->m1, nt);
    if (!sgd)
        put(n->v, a->v1, nt);
    if (!sgd && r->amsgrad)
        put(n->x, a->x1, nt);
    if (a->low)
        put_low(r, n->p, a->low, nt);
}

INLINE at where(const fcu_piece *c, uint64_t i, const float *roots, const int grad)
{
    return (at){ .p = c->p + i, .m = c->m + i, .v = c->v + i, .x = c->x + i,
                 .g = (const char *)c->g + i * (grad == FCU_F32 ? 4 : 2), .root = roots ? roots + i : NULL,
                 .p1 = c->p1 + i, .m1 = c->m1 + i, .v1 = c->v1 + i, .x1 = c->x1 + i,
                 .low = c->low ? c->low + i : NULL };
}

/* `together` vectors are computed before any is stored: the stores of one array then follow each other. How many
 * suit a memory, and whether it wants its lines fetched ahead, differs by processor: fcu_tuning. */
enum { TOGETHER = 8 }; /* at most */

INLINE void fetch(const fcu_rule *r, const at *a, uint64_t bytes, const int sgd, const int grad)
{
    FETCH((const char *)a->p + bytes);
    FETCH((const char *)a->g + (grad == FCU_F32 ? bytes : bytes / 2));
    if (!sgd || r->momentum_state == 2)
        FETCH((const char *)a->m + bytes);
    if (!sgd)
        FETCH((const char *)a->v + bytes);
    if (!sgd && r->amsgrad)
        FETCH((const char *)a->x + bytes);
}

INLINE uint64_t blocks(const fcu_rule *r, const fcu_piece *c, uint64_t i, uint64_t end, const float *roots,
                       uint64_t ahead, const int together, const int sgd, const int order, const int how,
                       const int grad)
{
    for (; i + together * N <= end; i += together * N) {
        next n[TOGETHER];
#pragma GCC unroll 1
        for (int k = 0; k < together; k++) {
            at a = where(c, i + k * N, roots, grad);
            if (ahead)
                fetch(r, &a, ahead, sgd, grad);
            n[k] = one(r, &a, sgd, order, how, grad, 0);
        }
        for (int k = 0; k < together; k++)
            stream(c->p1 + i + k * N, n[k].p);
        for (int k = 0; k < together && (!sgd || r->momentum_state); k++)
            stream(c->m1 + i + k * N, n[k].m);
        for (int k = 0; k < together && !sgd; k++)
            stream(c->v1 + i + k * N, n[k].v);
        for (int k = 0; k < together && !sgd && r->amsgrad; k++)
            stream(c->x1 + i + k * N, n[k].x);
        for (int k = 0; k < together && c->low; k++)
            put_low(r, n[k].p, c->low + i + k * N, 1);
    }
    return i;
}

/* Fewer elements than a vector, or a place where non-temporal stores cannot go: through buffers on the stack. One
 * function for all orders: it is rare, and 18 copies of it take a minute to compile. */
static __attribute__((noinline, noclone)) void few(const fcu_rule *r, const fcu_piece *c, uint64_t from, uint64_t n,
                                                   const float *roots, int sgd, int order, int how, int grad, int odd)
{
    float p[N] = { 0 }, m[N] = { 0 }, v[N] = { 0 }, x[N] = { 0 }, s[N] = { 0 }, g[N] = { 0 };
    float p1[N] = { 0 }, m1[N] = { 0 }, v1[N] = { 0 }, x1[N] = { 0 };
    uint16_t low[N];
    at a = where(c, from, roots, grad);
    at b = { p, m, v, x, g, s, p1, m1, v1, x1, c->low ? low : NULL };
    int second_state = !sgd, first_state = !sgd || r->momentum_state;
    memcpy(p, a.p, 4 * n);
    memcpy(g, a.g, (grad == FCU_F32 ? 4 : 2) * n);
    if (second_state)
        memcpy(v, a.v, 4 * n);
    if (!sgd || r->momentum_state == 2)
        memcpy(m, a.m, 4 * n);
    if (!sgd && r->amsgrad)
        memcpy(x, a.x, 4 * n);
    if (roots)
        memcpy(s, a.root, 4 * n);
    next result = one(r, &b, sgd, order, how, grad, odd);
    store(r, &b, &result, sgd, 0);
    memcpy(a.p1, p1, 4 * n);
    if (first_state)
        memcpy(a.m1, m1, 4 * n);
    if (second_state)
        memcpy(a.v1, v1, 4 * n);
    if (!sgd && r->amsgrad)
        memcpy(a.x1, x1, 4 * n);
    if (c->low)
        memcpy(a.low, low, 2 * n);
}

/* Is everything that is written on a boundary of whole vectors at the same elements, `low` of vectors half as long? */
INLINE int aligned_alike(const fcu_rule *r, const fcu_piece *c)
{
    uintptr_t base = (uintptr_t)c->p1, differ = base & 3, low_differs = 0;
    if (!r->sgd || r->momentum_state)
        differ |= base ^ (uintptr_t)c->m1;
    if (!r->sgd)
        differ |= base ^ (uintptr_t)c->v1;
    if (!r->sgd && r->amsgrad)
        differ |= base ^ (uintptr_t)c->x1;
    if (c->low)
        low_differs = (base >> 1) ^ (uintptr_t)c->low;
    return !(differ & (4 * N - 1)) && !(low_differs & (2 * N - 1));
}

/* One call of the vendor's square root for so many elements: they and what they come from stay in the first cache. */
enum { ROOTS = 1024 };

/* What the root is taken of. */
INLINE V radicand(const fcu_rule *r, const at *a, const int grad)
{
    V g = gradient(r, a->g, grad);
    if (r->decay == 1)
        g = fma_(ld(a->p), set1(r->weight_decay), g);
    V s = second(r, ld(a->v), g, FCU_TORCH_CPU, 0);
    return r->amsgrad ? larger(ld(a->x), s) : s;
}

/* The roots of [from, from+n) for FCU_SQRT_CALL. */
INLINE void call_roots(const fcu_rule *r, const fcu_piece *c, uint64_t from, uint64_t n, float *roots, const int grad)
{
    uint64_t i = 0;
    for (; i + N <= n; i += N) {
        at a = where(c, from + i, NULL, grad);
        st(roots + i, radicand(r, &a, grad));
    }
    if (i < n) {
        float g[N] = { 0 }, v[N] = { 0 }, x[N] = { 0 }, p[N] = { 0 };
        uint64_t k = n - i;
        at a = where(c, from + i, NULL, grad), b = { .p = p, .v = v, .x = x, .g = g };
        memcpy(g, a.g, (grad == FCU_F32 ? 4 : 2) * k);
        memcpy(v, a.v, 4 * k);
        if (r->decay == 1)
            memcpy(p, a.p, 4 * k);
        if (r->amsgrad)
            memcpy(x, a.x, 4 * k);
        st(v, radicand(r, &b, grad));
        memcpy(roots + i, v, 4 * k);
    }
    r->call((long long)n, roots, roots, 0x2 | 0x140000 | 0x100); /* VML_HA, FTZDAZ_OFF, ERRMODE_IGNORE: ATen's mode */
}

INLINE void run(const fcu_rule *rule, const fcu_piece *piece, const fcu_tuning *tuning, const int sgd,
                const int order, const int how, const int grad)
{
    /* Copies, or every store might have changed them and they would be read again for every vector. */
    const fcu_rule own_rule = *rule, *r = &own_rule;
    const fcu_piece own_piece = *piece, *c = &own_piece;
    const fcu_tuning t = *tuning;
    float roots[ROOTS];
    uint64_t i = 0, whole = c->n - c->odd, k;
    int fast = aligned_alike(r, c);
    while (i < whole) {
        uint64_t end = whole;
        const float *s = NULL;
        if (how == FCU_SQRT_CALL) {
            end = whole - i < ROOTS ? whole : i + ROOTS;
            call_roots(r, c, i, end - i, roots, grad);
            s = roots - i;
        }
        k = fast ? (uint64_t)(-(uintptr_t)(c->p1 + i) & (4 * N - 1)) / 4 : 0;
        if (k && k <= end - i) {
            few(r, c, i, k, s, sgd, order, how, grad, 0);
            i += k;
        }
        if (fast) {
            if (t.together >= 8)
                i = blocks(r, c, i, end, s, t.ahead, 8, sgd, order, how, grad);
            else if (t.together >= 4)
                i = blocks(r, c, i, end, s, t.ahead, 4, sgd, order, how, grad);
            else if (t.together >= 2)
                i = blocks(r, c, i, end, s, t.ahead, 2, sgd, order, how, grad);
            i = blocks(r, c, i, end, s, t.ahead, 1, sgd, order, how, grad);
        }
        for (; i < end; i += k) {
            k = end - i < N ? end - i : N;
            few(r, c, i, k, s, sgd, order, how, grad, 0);
        }
    }
    for (; i < c->n; i += k) {
        k = c->n - i < N ? c->n - i : N;
        few(r, c, i, k, NULL, sgd, order, FCU_SQRT_IEEE, grad, 1);
    }
}

/* -- parameters and states in 16 bits alone --------------------------------------------------------------------
 * Every operator of torch computes in fp32 and rounds what it stores. `type` is the type of all arrays. */

INLINE V near(V x, const int type) { return type == FCU_BF16 ? round_bf16(x) : round_f16(x); }

INLINE V held(const float *array, uint64_t i, uint64_t n, const int type)
{
    const uint16_t *from = (const uint16_t *)array + i;
    uint16_t last[N] = { 0 };
    if (n < N)
        from = memcpy(last, from, 2 * n);
    return type == FCU_BF16 ? ld_bf16(from) : ld_f16(from);
}

INLINE void hold(float *array, uint64_t i, uint64_t n, V x, const int type)
{
    uint16_t *to = (uint16_t *)array + i, last[N], *whole = n < N ? last : to;
    if (type == FCU_BF16)
        st_bf16(whole, x, 0);
    else
        st_f16(whole, x, 0);
    if (n < N)
        memcpy(to, last, 2 * n);
}

/* a.add(b, alpha): alpha is rounded, then a fused multiply-add; in the scalar loop the product is rounded, too. */
INLINE V added(V a, V b, float alpha, const int type, const int odd)
{
    V scale = near(set1(alpha), type);
    return near(odd ? add(a, near(mul(scale, b), type)) : fma_(scale, b, a), type);
}

INLINE next adam16_at(const fcu_rule *r, next a, V g, const int type, const int odd)
{
    V p = a.p, x, d;
    if (r->decay == 1)
        g = added(g, p, r->weight_decay, type, odd);
    else if (r->decay == 2)
        p = near(mul(p, set1(r->weight_decay)), type);
    V m = near(fma_(set1(r->w1), sub(g, a.m), r->lerp_far ? g : a.m), type);
    V v = near(fma_(mul(set1(r->omb2), g), g, near(mul(a.v, set1(r->beta2)), type)), type);
    x = r->amsgrad ? larger(a.x, v) : v;
    d = near(dvd(near(root(x), type), set1(r->bc2_sqrt)), type);
    d = near(add(d, near(set1(r->eps), type)), type);
    p = near(add(p, dvd(mul(set1(r->step), m), d)), type);
    return (next){ p, m, v, x };
}

INLINE next sgd16_at(const fcu_rule *r, next a, V g, const int type, const int odd)
{
    V m;
    if (r->decay)
        g = added(g, a.p, r->weight_decay, type, odd);
    m = g;
    if (r->momentum_state) {
        if (r->momentum_state == 2)
            m = added(near(mul(a.m, set1(r->momentum)), type), g, r->undamped, type, odd);
        g = r->nesterov ? added(g, m, r->momentum, type, odd) : m;
    }
    return (next){ added(a.p, g, r->step, type, odd), m, m, m };
}

INLINE void run16(const fcu_rule *r, const fcu_piece *c, const int type)
{
    int first = !r->sgd || r->momentum_state, second = !r->sgd, third = second && r->amsgrad;
    uint64_t whole = c->n - c->odd, n;
    for (uint64_t i = 0; i < c->n; i += n) {
        int odd = i >= whole;
        uint64_t left = (odd ? c->n : whole) - i;
        n = left < N ? left : N;
        V zero = set1(0), g = near(prepared(r, held(c->g, i, n, type), type), type);
        next a = { held(c->p, i, n, type), zero, zero, zero };
        if (second || r->momentum_state == 2)
            a.m = held(c->m, i, n, type);
        if (second)
            a.v = held(c->v, i, n, type);
        if (third)
            a.x = held(c->x, i, n, type);
        a = r->sgd ? sgd16_at(r, a, g, type, odd) : adam16_at(r, a, g, type, odd);
        hold(c->p1, i, n, a.p, type);
        if (first)
            hold(c->m1, i, n, a.m, type);
        if (second)
            hold(c->v1, i, n, a.v, type);
        if (third)
            hold(c->x1, i, n, a.x, type);
    }
}

#define FOR(sgd, order, how)                                                                   \
    do {                                                                                       \
        if (r->grad == FCU_F32)                                                                \
            run(r, c, t, sgd, order, how, FCU_F32);                                            \
        else if (r->grad == FCU_BF16)                                                          \
            run(r, c, t, sgd, order, how, FCU_BF16);                                           \
        else                                                                                   \
            run(r, c, t, sgd, order, how, FCU_F16);                                            \
    } while (0)

static void update(const fcu_rule *r, const fcu_piece *c, const fcu_tuning *t)
{
    if (r->held == FCU_BF16)
        run16(r, c, FCU_BF16);
    else if (r->held == FCU_F16)
        run16(r, c, FCU_F16);
    else if (r->sgd)
        FOR(1, 0, 0);
    else if (r->order == FCU_CUDA_FOREACH)
        FOR(0, FCU_CUDA_FOREACH, FCU_SQRT_IEEE);
    else if (r->order == FCU_CUDA_FUSED)
        FOR(0, FCU_CUDA_FUSED, FCU_SQRT_IEEE);
    else if (r->sqrt_mode == FCU_SQRT_CALL)
        FOR(0, FCU_TORCH_CPU, FCU_SQRT_CALL);
    else if (r->sqrt_mode == FCU_SQRT_RSQRT)
        FOR(0, FCU_TORCH_CPU, FCU_SQRT_RSQRT);
    else if (r->sqrt_mode == FCU_SQRT_RSQRT14)
        FOR(0, FCU_TORCH_CPU, FCU_SQRT_RSQRT14);
    else /* IEEE, and what was never met: chosen anew for every vector */
        FOR(0, FCU_TORCH_CPU, r->sqrt_mode);
}

static void roots(float *out, const float *in, uint64_t n, int how)
{
    for (uint64_t i = 0; i < n; i += N) {
        float buffer[N] = { 0 };
        uint64_t k = n - i < N ? n - i : N;
        memcpy(buffer, in + i, 4 * k);
        st(buffer, root_by(ld(buffer), how));
        memcpy(out + i, buffer, 4 * k);
    }
}

static void narrow(uint16_t *out, const float *in, uint64_t n, int type)
{
    for (uint64_t i = 0; i < n; i += N) {
        float buffer[N] = { 0 };
        uint16_t low[N];
        uint64_t k = n - i < N ? n - i : N;
        memcpy(buffer, in + i, 4 * k);
        if (type == FCU_BF16)
            st_bf16(low, ld(buffer), 0);
        else
            st_f16(low, ld(buffer), 0);
        memcpy(out + i, low, 2 * k);
    }
}
