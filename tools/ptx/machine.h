/* machine.h - runs the program of a kernel (ptx_program.py) a warp at a time, and counts what the
 * warps issue.
 *
 * The lanes of a warp have a program counter each. Those with the lowest run together until they
 * part at a branch or meet others at its target, which is how a GPU would do it where the compiler
 * lays out blocks in order. An operation of the whole warp waits for all lanes. */
#ifndef H2O_PTX_MACHINE_H
#define H2O_PTX_MACHINE_H

#include <cstdint>
#include <string>
#include <unordered_set>
#include <vector>

enum { LANES = 32, SHARED_AT = 1024 /* see ptx_program.py */ };
enum {
    CACHED = 1024
}; /* sectors that a block finds again in L1, at most, as 32 KB mapped directly */
enum space { GENERIC, GLOBAL, SHARED, PARAM };
static const uint32_t ALL = 0xffffffffu;

struct warp;
struct instruction;
typedef void handler(warp &w, instruction &i, uint32_t mask);

/* What the machine does itself: branches, returns, barriers of a block, and times of copies and of
 * what waits until earlier stores of the block are there. */
enum role { PLAIN, BRANCH, RETURN, BARRIER, COPY, FENCE, RELEASE };

struct instruction {
    handler *run;
    std::string name;
    int kind, guard, results, target; /* see ptx_program.py */
    double cost;
    enum space space;
    int64_t offset;
    std::vector<int> at; /* operands: slots */
    bool leads;          /* lanes may meet here */
    bool all;            /* an operation of the whole warp */
    bool travels;        /* it has touched global memory just now */
    bool cached;         /* it loads by way of L1 */
    enum role role;
    uint64_t issued, wavefronts, sectors, fetched, bytes; /* counts of a launch */
};

/* An asynchronous copy on its way. */
struct copy {
    uint64_t to, from;
    int bytes, batch;
};

struct warp {
    uint64_t (*slot)[LANES];  /* [slots], of each lane */
    std::vector<float> ready; /* [slots]: round trips to memory until a slot has its value, ... */
    float entry, latest;      /* ... until the basic block begins, and until all of it has issued */
    float stored;             /* ... and until what has been stored is there */
    int pc[LANES];
    uint32_t live, waiting;
    unsigned first; /* thread */
    instruction *barrier;
    std::vector<copy> copies;
    std::vector<float> landed; /* when each batch of copies has arrived */
    float landing;             /* of the open batch */
};

/* What a block and its handlers see of the launch. */
struct launch {
    uint32_t grid[3], at[3], threads;
    char *shared;
    uint32_t shared_bytes;
    const char *params, *workspace; /* addresses of the two parameters */
    uint64_t random;
    uint64_t cached[CACHED];               /* of the block: sectors in L1 */
    std::unordered_set<uint64_t> *sectors; /* of global memory, that any warp has touched */
};
extern launch now;

/* The handler of a name; NULL: there is none. */
handler *find_handler(const std::string &name);

/* Ends the launch with a text. */
[[noreturn]] void fail(const instruction &i, const std::string &text);

#endif
