/* machine.cpp - runs the program of a kernel (ptx_program.py) one warp at a time, and counts what
 * the warps issue. It defines the functions of the emulation (tests/cuda/shim/shim.h), so that a
 * program can be linked with either.
 *
 * Each lane of a warp has its own program counter. The lanes with the lowest counter run together
 * until they diverge at a branch or meet others at its target. A GPU does the same if the compiler
 * lays out basic blocks in order. An operation of the whole warp waits for all lanes.
 *
 * The environment variable H2O_PTX is the path of the program. If H2O_PTX_COUNTS is the path of a
 * file, each launch appends a line to it, a JSON object:
 *
 *   kernel, grid, block
 *   shared      bytes of shared memory per block
 *   issued      issue slots of all warps
 *   kinds       `issued` by kind of instruction
 *   wavefronts  passes of shared memory
 *   sectors     sectors of 32 bytes of global memory that the instructions of warps access
 *   fetched     those sectors that are not in the block's L1
 *   bytes       bytes that the accesses use
 *   distinct    number of different sectors that the launch accesses
 *   trips       successive round trips to global memory in a block, the most and the mean */
#include "instructions.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>

struct kernel {
    std::string name;
    size_t parameters = 0, slots = 0;
    std::vector<std::pair<int, uint64_t>> constants;
    std::vector<std::pair<int, std::string>> special;
    std::vector<instruction> code;
};

static std::vector<std::string> kinds;
static std::string error;
static uint64_t seed;

/* ---- The program --------------------------------------------------------- */

static int kind_number(const std::string &name) {
    const auto found = std::find(kinds.begin(), kinds.end(), name);
    if (found != kinds.end()) return (int)(found - kinds.begin());
    kinds.push_back(name);
    return (int)kinds.size() - 1;
}

static instruction read_instruction(std::istringstream &words) {
    instruction i = {};
    std::string kind;
    int space, slot;
    words >> i.name >> kind >> i.cost >> i.guard >> i.results >> space >> i.offset >> i.target;
    while (words >> slot) i.at.push_back(slot);
    i.kind = kind_number(kind);
    i.space = (enum space)space;
    i.run = find_handler(i.name);
    if (!i.run) throw failure{"no instruction " + i.name};
    i.role = i.name == "bra"                             ? BRANCH
             : i.name == "ret"                           ? RETURN
             : i.name == "bar" || i.name == "bar.red"    ? BARRIER
             : i.name == "copy"                          ? COPY
             : i.name == "copy.wait"                     ? FENCE
             : i.name == "membar"                        ? RELEASE
             : i.name.starts_with("atom.release")        ? RELEASE
                                                         : PLAIN;
    i.all = kind == "mma" || kind == "ldmatrix" ||
            (kind == "sync" && i.role != FENCE && i.role != RELEASE);
    i.cached = i.name.starts_with("load") || (i.role == COPY && i.offset == 4);
    return i;
}

static std::vector<kernel> read_program(const std::string &path) {
    std::vector<kernel> all;
    std::ifstream file(path);
    if (!file) throw failure{"H2O_PTX: cannot read " + path};
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string word, name;
        int slot;
        uint64_t value;
        words >> word;
        if (word == "kernel") {
            all.emplace_back();
            words >> all.back().name >> all.back().parameters >> all.back().slots;
        } else if (word == "const") {
            words >> slot >> value;
            all.back().constants.push_back({slot, value});
        } else if (word == "special") {
            words >> slot >> name;
            all.back().special.push_back({slot, name});
        } else {
            all.back().code.push_back(read_instruction(words));
        }
    }
    for (kernel &k : all) {
        for (size_t i = 0; i < k.code.size(); i++) {
            const int target = k.code[i].target;
            if (target < 0) continue;
            k.code[(size_t)target].leads = true;
            if (i + 1 < k.code.size()) k.code[i + 1].leads = true;
        }
    }
    return all;
}

static std::vector<kernel> &program(void) {
    static std::vector<kernel> all;
    static std::string known;
    const char *const path = getenv("H2O_PTX");
    if (known != (path ? path : "")) {
        all = read_program(path);
        known = path;
    }
    return all;
}

static kernel *find_kernel(const char *name) {
    for (kernel &k : program()) {
        if (k.name == name) return &k;
    }
    return nullptr;
}

/* ---- Warps --------------------------------------------------------------- */

static uint64_t special_value(const std::string &name, unsigned thread) {
    if (name == "tid.x") return thread;
    if (name == "ntid.x") return now.threads;
    if (name == "parameter.0") return (uint64_t)(uintptr_t)now.params;
    if (name == "parameter.1") return (uint64_t)(uintptr_t)now.workspace;
    const int axis = name.back() - 'x';
    return name[0] == 'n' ? now.grid[axis] : now.at[axis];
}

static void open_warp(warp &w, const kernel &k, unsigned first) {
    w.ready.assign(k.slots, 0.0f);
    w.entry = w.latest = w.landing = w.stored = 0.0f;
    w.live = ALL;
    w.waiting = 0;
    w.first = first;
    w.barrier = nullptr;
    w.copies.clear();
    w.landed.clear();
    memset(w.pc, 0, sizeof w.pc);
    for (const auto &[slot, value] : k.constants) {
        for (int l = 0; l < LANES; l++) w.slot[slot][l] = value;
    }
    for (const auto &[slot, name] : k.special) {
        for (int l = 0; l < LANES; l++) w.slot[slot][l] = special_value(name, first + (unsigned)l);
    }
}

/* Sets when the results of an instruction are ready, in round trips. Assumes that within a basic
 * block the compiler starts loads as soon as their addresses are known. */
static void advance(warp &w, instruction &i) {
    float start = w.entry;
    if (i.guard) start = std::max(start, w.ready[(size_t)std::abs(i.guard) - 1]);
    for (size_t n = (size_t)i.results; n < i.at.size(); n++) {
        start = std::max(start, w.ready[(size_t)i.at[n]]);
    }
    if (i.role == RELEASE) start = std::max(start, w.stored);
    if (i.travels && i.results == 0 && i.role != COPY) w.stored = std::max(w.stored, start + 1.0f);
    for (int n = 0; n < i.results; n++) w.ready[(size_t)i.at[(size_t)n]] = start + i.travels;
    i.travels = false;
    w.latest = std::max(w.latest, start);
}

static uint32_t lanes_where(const warp &w, int guard, uint32_t mask) {
    if (guard == 0) return mask;
    const uint64_t *const p = w.slot[std::abs(guard) - 1];
    uint32_t taken = 0;
    for (int l = 0; l < LANES; l++) taken |= (uint32_t)((p[l] & 1) == (guard > 0)) << l;
    return taken & mask;
}

static void set_counters(warp &w, uint32_t mask, int pc) {
    for (int l = 0; l < LANES; l++) {
        if (mask >> l & 1) w.pc[l] = pc;
    }
}

/* The lanes to run next: those with the lowest counter among the lanes that do not wait. If all
 * wait, none has to wait any longer. Then all must be in one place. */
static uint32_t next_lanes(warp &w, const kernel &k, int *pc) {
    uint32_t mask = 0;
    const bool all_wait = (w.live & ~w.waiting) == 0;
    if (all_wait) w.waiting = 0;
    const uint32_t among = w.live & ~w.waiting;
    *pc = INT32_MAX;
    for (int l = 0; l < LANES; l++) {
        if (among >> l & 1) *pc = std::min(*pc, w.pc[l]);
    }
    for (int l = 0; l < LANES; l++) mask |= (uint32_t)((among >> l & 1) && w.pc[l] == *pc) << l;
    const instruction &i = k.code[(size_t)*pc];
    if (i.all && all_wait && mask != w.live) fail(i, "lanes wait in different places");
    return mask;
}

/* Runs a warp until the next barrier of its block or its own end. */
static void run_warp(warp &w, kernel &k) {
    int pc;
    w.barrier = nullptr;
    uint32_t mask = w.live ? next_lanes(w, k, &pc) : 0;
    while (w.live) {
        if ((size_t)pc >= k.code.size()) throw failure{k.name + " runs past its end"};
        instruction &i = k.code[(size_t)pc];
        if (i.leads) w.entry = w.latest;
        if (mask != w.live && (i.leads || i.all)) {
            set_counters(w, mask, pc);
            if (i.all) w.waiting |= mask;
            const int before = pc;
            const uint32_t others = mask;
            mask = next_lanes(w, k, &pc);
            if (pc != before || mask != others) continue;
        }
        const uint32_t taken = lanes_where(w, i.guard, mask);
        i.issued++;
        if (taken && i.role != BARRIER) i.run(w, i, taken);
        advance(w, i);
        if (i.role == BRANCH) {
            if (taken == mask) {
                pc = i.target;
            } else if (taken == 0) {
                pc++;
            } else {
                set_counters(w, taken, i.target);
                set_counters(w, mask & ~taken, pc + 1);
                mask = next_lanes(w, k, &pc);
            }
            continue;
        }
        if (i.role == RETURN) {
            w.live &= ~taken;
            if (!w.live) return;
            set_counters(w, mask, pc + 1);
            mask = next_lanes(w, k, &pc);
            continue;
        }
        pc++;
        if (i.role == BARRIER) {
            if (w.live != ALL) fail(i, "some lanes have returned");
            w.barrier = &i;
            w.entry = w.latest;
            set_counters(w, ALL, pc);
            return;
        }
        if (i.role == COPY) w.landing = std::max(w.landing, w.latest + 1.0f);
        if (i.role == FENCE || i.role == RELEASE) w.entry = w.latest;
    }
}

/* ---- Blocks -------------------------------------------------------------- */

/* Releases the warps from a barrier that all have reached. Sets the result of bar.red, and the time
 * to that of the last warp. */
static void release(std::vector<warp> &warps) {
    bool any = false;
    float latest = 0.0f, stored = 0.0f;
    for (warp &w : warps) {
        if (!w.barrier) throw failure{"warps wait at a barrier, but others have returned"};
        latest = std::max(latest, w.latest);
        stored = std::max(stored, w.stored);
        if (w.barrier->results == 0) continue;
        for (int l = 0; l < LANES; l++) any |= w.slot[w.barrier->at[1]][l] & 1;
    }
    for (warp &w : warps) {
        w.entry = w.latest = latest;
        w.stored = stored;
        if (w.barrier->results == 0) continue;
        const int result = w.barrier->at[0];
        w.ready[(size_t)result] = latest;
        for (int l = 0; l < LANES; l++) w.slot[result][l] = any;
    }
}

/* Runs a block. Returns its number of successive round trips to memory. */
static float run_block(kernel &k, std::vector<warp> &warps) {
    memset(now.shared, 0xff, now.shared_bytes);
    memset(now.cached, 0xff, sizeof now.cached);
    for (size_t n = 0; n < warps.size(); n++) open_warp(warps[n], k, (unsigned)n * LANES);
    for (;;) {
        const size_t first = seed ? (now.random >> 33) % warps.size() : 0;
        for (size_t n = 0; n < warps.size(); n++) run_warp(warps[(first + n) % warps.size()], k);
        bool done = true;
        for (const warp &w : warps) done = done && !w.live;
        if (done) break;
        release(warps);
    }
    float trips = 0.0f;
    for (const warp &w : warps) trips = std::max(trips, w.latest);
    return trips;
}

static void report(const kernel &k, float most, double mean) {
    const char *const path = getenv("H2O_PTX_COUNTS");
    FILE *const file = path ? fopen(path, "a") : nullptr;
    if (!file) return;
    std::vector<double> issued(kinds.size());
    uint64_t wavefronts = 0, sectors = 0, fetched = 0, bytes = 0;
    double total = 0;
    for (const instruction &i : k.code) {
        issued[(size_t)i.kind] += i.cost * (double)i.issued;
        total += i.cost * (double)i.issued;
        wavefronts += i.wavefronts;
        sectors += i.sectors;
        fetched += i.fetched;
        bytes += i.bytes;
    }
    fprintf(file, "{\"kernel\": \"%s\", \"grid\": [%u, %u, %u], \"block\": %u, \"shared\": %u, ",
            k.name.c_str(), now.grid[0], now.grid[1], now.grid[2], now.threads, now.shared_bytes);
    fprintf(file, "\"issued\": %.0f, \"kinds\": {", total);
    const char *comma = "";
    for (size_t n = 0; n < kinds.size(); n++) {
        if (issued[n] == 0) continue;
        fprintf(file, "%s\"%s\": %.0f", comma, kinds[n].c_str(), issued[n]);
        comma = ", ";
    }
    fprintf(file,
            "}, \"wavefronts\": %llu, \"sectors\": %llu, \"fetched\": %llu, \"bytes\": %llu, "
            "\"distinct\": %zu, \"trips\": [%g, %g]}\n",
            (unsigned long long)wavefronts, (unsigned long long)sectors,
            (unsigned long long)fetched, (unsigned long long)bytes, now.sectors->size(),
            (double)most, mean);
    fclose(file);
}

static void run_launch(kernel &k, unsigned blocks) {
    const unsigned count = now.threads / LANES;
    std::vector<warp> warps(count);
    std::vector<uint64_t> slots(count * k.slots * LANES), shared(now.shared_bytes / 8 + 2);
    std::unordered_set<uint64_t> sectors;
    float most = 0.0f;
    double sum = 0.0;
    now.sectors = &sectors;
    now.shared = (char *)(((uintptr_t)shared.data() + 15) / 16 * 16);
    for (unsigned n = 0; n < count; n++) {
        warps[n].slot = (uint64_t (*)[LANES])slots.data() + n * k.slots;
    }
    for (instruction &i : k.code) i.issued = i.wavefronts = i.sectors = i.fetched = i.bytes = 0;
    for (unsigned n = 0; n < blocks; n++) {
        const unsigned at = (unsigned)((n + seed * 7919) % blocks);
        now.at[0] = at % now.grid[0];
        now.at[1] = at / now.grid[0] % now.grid[1];
        now.at[2] = at / now.grid[0] / now.grid[1];
        const float trips = run_block(k, warps);
        most = std::max(most, trips);
        sum += trips;
    }
    report(k, most, sum / blocks);
}

/* ---- The emulation's functions ------------------------------------------- */

extern "C" void shim_seed(uint64_t n) { seed = n; }
extern "C" const char *shim_error(void) { return error.c_str(); }
extern "C" void shim_unset(void *p, size_t bytes) { memset(p, 0xff, bytes); }

extern "C" long shim_params_size(const char *name) {
    const kernel *const k = find_kernel(name);
    return k ? (long)k->parameters : -1;
}

extern "C" const char *shim_kernel(size_t i) {
    return i < program().size() ? program()[i].name.c_str() : nullptr;
}

extern "C" int shim_launch(const char *name, const void *params, size_t size, char *workspace,
                           const unsigned grid[3], unsigned block, unsigned shared) {
    try {
        kernel *const k = find_kernel(name);
        const uint64_t blocks = (uint64_t)grid[0] * grid[1] * grid[2];
        if (!k) throw failure{std::string(name) + ": no such kernel"};
        if (size != k->parameters || !block || block % LANES || block > 1024 || !blocks ||
            blocks > INT32_MAX || shared > 99 << 10) {
            throw failure{std::string(name) + ": bad launch"};
        }
        std::vector<uint64_t> copied(size / 8 + 1);
        memcpy(copied.data(), params, size);
        now = {};
        memcpy(now.grid, grid, sizeof now.grid);
        now.threads = block;
        now.shared_bytes = shared;
        now.params = (const char *)copied.data();
        now.workspace = (const char *)&workspace;
        now.random = seed * 2654435761u + 1;
        run_launch(*k, (unsigned)blocks);
        return 0;
    } catch (const failure &f) {
        error = f.text;
        return 719;
    }
}
