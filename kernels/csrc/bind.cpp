// The Python module. Every argument is an address, a size or a number; shapes and types are checked in
// Python, and here, before any kernel runs, every index that a kernel follows. The GIL is released around all
// work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "model.hpp"
#include "pool.hpp"
#include "table.hpp"

#if SAPWOOD_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace py = pybind11;
using namespace sapwood;

namespace {

using Address = uintptr_t;

const Table *active = nullptr;
int threads = 1;

const Table &table() {
    if (!active) throw std::runtime_error("select() an instruction set first");
    return *active;
}

template <class T>
T *at(Address address) {
    return reinterpret_cast<T *>(address);
}

#if SAPWOOD_X86
bool cpu_has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
bool cpu_has_avx2() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && cpu_has_f16c();
}
bool cpu_has_avx512() {
    return cpu_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
}
// Linux saves the tiles only of a process that has asked for them; it refuses where the CPU has none, or
// where a signal stack is too small for them.
bool system_grants_tiles() {
#ifdef __linux__
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}
bool cpu_has_amx() {
    constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24;
    unsigned a, b, c, d;
    return built_with_tiles() && cpu_has_avx512() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & BF16) &&
           (d & TILES) && system_grants_tiles();
}
#endif

const Table *usable_table(const std::string &isa) {
#if SAPWOOD_X86
    if (isa == "amx" && cpu_has_amx()) return &avx512_table();
    if (isa == "avx512" && cpu_has_avx512()) return &avx512_table();
    if (isa == "avx2" && cpu_has_avx2()) return &avx2_table();
#endif
    return isa == "portable" ? &portable_table() : nullptr;
}

std::vector<std::string> usable() {
    std::vector<std::string> found;
    for (const char *isa : {"amx", "avx512", "avx2", "portable"})
        if (usable_table(isa)) found.push_back(isa);
    return found;
}

void choose(const std::string &isa, int count) {
    const Table *chosen = usable_table(isa);
    if (!chosen || count < 1) throw std::invalid_argument("cannot run " + isa);
#if SAPWOOD_X86
    use_tiles(isa == "amx");
#endif
    active = chosen;
    threads = count;
    set_threads(count);
}

// The first i with !(0 <= values[i] < limit), else -1.
int64_t first_outside(const int32_t *values, int64_t n, int64_t limit) {
    bool outside = false;
    for (int64_t i = 0; i < n; i++) outside |= (uint32_t)values[i] >= (uint64_t)limit;
    for (int64_t i = 0; outside && i < n; i++)
        if ((uint32_t)values[i] >= (uint64_t)limit) return i;
    return -1;
}

void call_linear(Address x, int64_t x_stride, int64_t m, Address weight, int format, int64_t n, int64_t k,
                 Address out, int64_t out_stride, bool accumulate) {
    table().linear({at<float>(x),
                    x_stride,
                    m,
                    {at<void>(weight), Format(format), n, k},
                    at<float>(out),
                    out_stride,
                    accumulate},
                   threads);
}

int64_t call_embed(Address ids, int64_t m, Address weight, int format, int64_t n, int64_t k, Address out) {
    const int64_t wrong = first_outside(at<int32_t>(ids), m, n);
    if (wrong < 0)
        table().embed({at<int32_t>(ids), m, {at<void>(weight), Format(format), n, k}, at<float>(out)},
                      threads);
    return wrong;
}

void call_pack(Address weight, int64_t n, int64_t k, Address out, int format) {
    table().pack({at<float>(weight), n, k, at<void>(out), Format(format)}, threads);
}

void call_pack_codes(Address codes, Address scales, Address lows, int64_t n, int64_t k, Address out,
                     int format) {
    table().pack_codes(
        {at<int8_t>(codes), at<float>(scales), at<float>(lows), n, k, at<void>(out), Format(format)},
        threads);
}

void call_rms_norm(Address x, int64_t x_stride, int64_t m, int64_t heads, int64_t size, Address weight,
                   float eps, Address out, int64_t out_stride) {
    table().rms_norm(
        {at<float>(x), x_stride, m, heads, size, at<float>(weight), eps, at<float>(out), out_stride},
        threads);
}

void call_gated_mul(Address gate_up, int64_t m, int64_t size, int activation, Address out) {
    table().gated_mul({at<float>(gate_up), m, size, Activation(activation), at<float>(out)}, threads);
}

int64_t call_rope_store(Address qkv, int64_t m, Address positions, Address slots, Address cos_sin,
                        int64_t max_len, int64_t hq, int64_t hkv, int64_t d, int64_t rotary, Address k_pool,
                        Address v_pool, int dtype, int64_t num_slots) {
    int64_t wrong = first_outside(at<int32_t>(positions), m, max_len);
    if (wrong < 0) wrong = first_outside(at<int32_t>(slots), m, num_slots);
    if (wrong < 0)
        table().rope_store({at<float>(qkv), m, at<int32_t>(positions), at<int32_t>(slots), at<float>(cos_sin),
                            hq, hkv, d, rotary, at<void>(k_pool), at<void>(v_pool), Dtype(dtype)},
                           threads);
    return wrong;
}

// The first row of the call that reaches outside the slot table, the pool, or the m tokens; else -1.
int64_t wrong_row(const Attention &args, int64_t m, int64_t num_slots, int64_t max_rows) {
    int64_t tokens = 0;
    for (int64_t i = 0; i < args.num_rows; i++) {
        const int64_t row = args.rows[i], start = args.starts[i], count = args.counts[i];
        tokens += count;
        if (row < 0 || row >= max_rows || start < 0 || count < 0 || start + count > args.table_stride ||
            tokens > m)
            return i;
        if (count > 0 &&
            first_outside(args.slot_table + row * args.table_stride, start + count, num_slots) >= 0)
            return i;
    }
    return tokens == m ? -1 : args.num_rows;
}

// Throws unless every stretch is whole tiles before its rows' new tokens, and a row's follow each other.
void check_shared(const Attention &args) {
    std::vector<int32_t> reached((size_t)args.num_rows, 0);
    for (int64_t at = 0; at < args.shared_size;) {
        const int32_t *stretch = args.shared + at;
        const auto fail = [&](const std::string &why) {
            throw std::invalid_argument("shared[" + std::to_string(at) + "]: " + why);
        };
        if (at + 3 > args.shared_size || stretch[2] < 1 || at + 3 + stretch[2] > args.shared_size)
            fail("a stretch is begin, end, how many rows, and so many rows");
        const int32_t begin = stretch[0], end = stretch[1];
        if (begin < 0 || begin >= end || begin % 64 || end % 64)
            fail("positions " + std::to_string(begin) + " to " + std::to_string(end) +
                 " are not whole tiles of 64");
        for (int32_t j = 0; j < stretch[2]; j++) {
            const int32_t i = stretch[3 + j];
            if (i < 0 || i >= args.num_rows)
                throw std::out_of_range("shared[" + std::to_string(at + 3 + j) + "]: row " +
                                        std::to_string(i) + " of the call does not exist");
            if (begin < reached[i] || end > args.starts[i])
                fail("positions " + std::to_string(begin) + " to " + std::to_string(end) +
                     " do not lie between the stretch before and the new tokens of row " + std::to_string(i));
            reached[i] = end;
        }
        at += 3 + stretch[2];
    }
}

int64_t call_attend(Address qkv, int64_t m, Address k_pool, Address v_pool, int dtype, int64_t num_slots,
                    Address slot_table, int64_t max_rows, int64_t max_len, Address rows, Address starts,
                    Address counts, int64_t num_rows, int64_t hq, int64_t hkv, int64_t d, int64_t window,
                    float scale, Address out, Address shared, int64_t shared_size) {
    const Attention args = {at<float>(qkv),
                            at<void>(k_pool),
                            at<void>(v_pool),
                            Dtype(dtype),
                            at<int32_t>(slot_table),
                            max_len,
                            at<int32_t>(rows),
                            at<int32_t>(starts),
                            at<int32_t>(counts),
                            num_rows,
                            hq,
                            hkv,
                            d,
                            window,
                            scale,
                            at<float>(out),
                            at<int32_t>(shared),
                            shared_size};
    const int64_t wrong = wrong_row(args, m, num_slots, max_rows);
    if (wrong >= 0) return wrong;
    check_shared(args);
    table().attend(args, threads);
    return wrong;
}

// -1; or the first token, or m + the first row, with an id, position or slot that does not exist.
int64_t call_forward(const RegisteredModel &registered, int64_t m, Address ids, Address positions,
                     Address slots, Address slot_table, int64_t max_rows, int64_t max_len, Address rows,
                     Address starts, Address counts, int64_t num_rows, Address shared, int64_t shared_size,
                     Address hidden) {
    const Forward args = {&registered.model(),
                          m,
                          at<int32_t>(ids),
                          at<int32_t>(positions),
                          at<int32_t>(slots),
                          at<int32_t>(slot_table),
                          max_len,
                          at<int32_t>(rows),
                          at<int32_t>(starts),
                          at<int32_t>(counts),
                          num_rows,
                          at<int32_t>(shared),
                          shared_size,
                          at<float>(hidden)};
    int64_t wrong = first_outside(args.ids, m, registered.vocab());
    if (wrong < 0) wrong = first_outside(args.positions, m, registered.max_length());
    if (wrong < 0) wrong = first_outside(args.slots, m, registered.num_slots());
    if (wrong >= 0) return wrong;
    Attention attention = {};
    attention.slot_table = args.slot_table;
    attention.table_stride = max_len;
    attention.rows = args.rows;
    attention.starts = args.starts;
    attention.counts = args.counts;
    attention.num_rows = num_rows;
    attention.shared = args.shared;
    attention.shared_size = shared_size;
    wrong = wrong_row(attention, m, registered.num_slots(), max_rows);
    if (wrong >= 0) return m + wrong;
    check_shared(attention);
    table().forward(args, threads);
    return -1;
}

// -1, or the first draw with a row that does not exist, or n + the first row with a token that does not.
int64_t call_sample(Address logits, int64_t rows, int64_t vocab, Address changes, Address penalties,
                    Address source, int64_t n, Address temperature, Address top_k, Address top_p,
                    Address min_p, Address seeds, Address choices, Address positions, Address ids,
                    Address errors) {
    const int64_t wrong = first_outside(at<int32_t>(source), n, rows);
    for (int64_t row = 0; changes && row < rows; row++) {
        const Change &change = at<Change>(changes)[row];
        if (first_outside(change.bias_ids, change.num_biases, vocab) >= 0 ||
            first_outside(change.banned, change.num_banned, vocab) >= 0)
            return n + row;
    }
    if (wrong < 0)
        table().sample({at<float>(logits), vocab, at<Change>(changes), at<float>(penalties),
                        at<int32_t>(source), n, at<float>(temperature), at<int32_t>(top_k), at<float>(top_p),
                        at<float>(min_p), at<int64_t>(seeds), at<int32_t>(choices), at<int32_t>(positions),
                        at<int32_t>(ids), at<int32_t>(errors)},
                       threads);
    return wrong;
}

int64_t call_logprobs(Address logits, int64_t rows, int64_t vocab, Address source, Address ids, Address top,
                      int64_t n, int64_t kmax, Address logprob, Address top_ids, Address top_values,
                      Address norm) {
    int64_t wrong = first_outside(at<int32_t>(source), n, rows);
    if (wrong < 0) wrong = first_outside(at<int32_t>(ids), n, vocab);
    if (wrong < 0) wrong = first_outside(at<int32_t>(top), n, kmax + 1);
    if (wrong < 0)
        table().logprobs(
            {at<float>(logits), vocab, at<int32_t>(source), at<int32_t>(ids), at<int32_t>(top), n, kmax,
             at<float>(logprob), at<int32_t>(top_ids), at<float>(top_values), at<double>(norm)},
            threads);
    return wrong;
}

double call_limit(int kind, Address memory, int64_t work) {
    return table().limit({LimitKind(kind), at<void>(memory), work}, threads);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
    const auto work = py::call_guard<py::gil_scoped_release>();
    m.def("usable", &usable);
    m.def("select", &choose);
    m.def("linear", &call_linear, work);
    m.def("embed", &call_embed, work);
    m.def("pack", &call_pack, work);
    m.def("pack_codes", &call_pack_codes, work);
    m.def("rms_norm", &call_rms_norm, work);
    m.def("gated_mul", &call_gated_mul, work);
    m.def("rope_store", &call_rope_store, work);
    m.def("attend", &call_attend, work);
    py::class_<RegisteredModel>(m, "Model")
        .def(py::init<const py::dict &>())
        .def("add_layer", &RegisteredModel::add_layer);
    m.def("forward", &call_forward, work);
    m.def("sample", &call_sample, work);
    m.def("logprobs", &call_logprobs, work);
    m.def("limit", &call_limit, work);
}
