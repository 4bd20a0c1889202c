/* instructions.h - the instructions of a program (ptx_program.py), and what they change: a warp, and
 * the launch that it belongs to. */
#ifndef H2O_PTX_INSTRUCTIONS_H
#define H2O_PTX_INSTRUCTIONS_H

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

/* What machine.cpp does itself: branches, returns, barriers of a block, and times of copies and of
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

struct failure {
    std::string text;
};

/* Ends the launch by a failure that names the block and the instruction. */
[[noreturn]] void fail(const instruction &i, const std::string &text);

#endif
