/* instructions.h - the instructions of a program (ptx_program.py), and the state that they change:
 * a warp and its launch. */
#ifndef H2O_PTX_INSTRUCTIONS_H
#define H2O_PTX_INSTRUCTIONS_H

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

enum { LANES = 32, SHARED_AT = 1024 /* see ptx_program.py */ };
enum {
    CACHED = 1024
}; /* sectors in a block's part of L1, modeled as a direct-mapped cache of 32 KB */
enum space { GENERIC, GLOBAL, SHARED, PARAM };
static const uint32_t ALL = 0xffffffffu;

struct warp;
struct instruction;
typedef void handler(warp &w, instruction &i, uint32_t mask);

/* What machine.cpp does for an instruction: branches, returns, barriers of a block, and the times
 * of copies and of instructions that wait for earlier stores of the block. */
enum role { PLAIN, BRANCH, RETURN, BARRIER, COPY, FENCE, RELEASE };

struct instruction {
    handler *run;
    std::string name;
    int kind, guard, results, target; /* see ptx_program.py */
    double cost;
    enum space space;
    int64_t offset;
    std::vector<int> at; /* slots of the operands */
    bool leads;          /* begins a basic block, where lanes may meet */
    bool all;            /* needs all lanes of the warp */
    bool travels;        /* its last execution accessed global memory */
    bool cached;         /* loads through L1 */
    enum role role;
    uint64_t issued, wavefronts, sectors, fetched, bytes; /* counts of a launch */
};

/* An asynchronous copy that has not arrived yet. */
struct copy {
    uint64_t to, from;
    int bytes, batch;
};

struct warp {
    uint64_t (*slot)[LANES];  /* [slots], the value in each lane */
    std::vector<float> ready; /* [slots]: round trips to memory until a slot has its value, ... */
    float entry, latest;      /* ... until the basic block begins, until all of it has issued, */
    float stored;             /* ... and until earlier stores have arrived */
    int pc[LANES];
    uint32_t live, waiting;
    unsigned first; /* index of the warp's first thread in the block */
    instruction *barrier;
    std::vector<copy> copies;
    std::vector<float> landed; /* arrival time of each closed batch of copies */
    float landing;             /* arrival time of the open batch */
};

/* The state of the launch that a block and its handlers see. */
struct launch {
    uint32_t grid[3], at[3], threads;
    char *shared;
    uint32_t shared_bytes;
    const char *params, *workspace; /* addresses of the two parameters */
    uint64_t random;
    uint64_t cached[CACHED];               /* sectors of this block in L1 */
    std::unordered_set<uint64_t> *sectors; /* sectors of global memory that any warp has accessed */
};
extern launch now;

/* The handler of an instruction's name, or NULL. */
handler *find_handler(const std::string &name);

struct failure {
    std::string text;
};

/* Ends the launch with a failure that names the block and the instruction. */
[[noreturn]] void fail(const instruction &i, const std::string &text);

#endif
