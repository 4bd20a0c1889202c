"""Generation with llama.cpp. Sequences share one cache and are answered when there is room in it.

Started by peers.Peer with a GGUF file and the number of threads. A request is {"ids": [[...], ...],
"tokens": one number per prompt, "cells": tokens that the cache may hold at a time, 0 for no limit};
the answer is {"seconds": ..., "ids": the new tokens}. Keys and values are float16. Flash attention
is off, since it is slower here, except if requests share cells.

The first waiting request that fits is admitted once all its cells are free. Each call of
llama_decode gets the next token of every running request, and fills the rest of the batch with
tokens of prompts.
"""

import json
import sys
import time
from ctypes import c_void_p

import llama_cpp as llama
import numpy

file, threads = sys.argv[1], int(sys.argv[2])
PAGE = 256  # sizes of llama.cpp's caches are multiples of it
BATCH = 2048
AT_ONCE = 512  # tokens of a batch that are computed at a time


class Running:
    """A request in the cache."""

    def __init__(self, number, ids, new, sequence):
        self.number, self.new, self.sequence = number, new, sequence
        self.cells = len(ids) + new
        self.waiting = ids  # tokens that the model has not processed
        self.seen = 0
        self.answer = []


class Cache:
    """A cache of `cells` cells, which its sequences share if it is `unified`."""

    def __init__(self, cells, sequences, unified):
        wanted = llama.llama_context_default_params()
        wanted.n_ctx, wanted.n_seq_max, wanted.kv_unified = cells, sequences, unified
        wanted.n_batch, wanted.n_ubatch = BATCH, AT_ONCE
        wanted.n_threads = wanted.n_threads_batch = threads
        wanted.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_DISABLED
        wanted.type_k = wanted.type_v = llama.GGML_TYPE_F16
        self.context = llama.llama_init_from_model(model, wanted)
        assert self.context, "llama.cpp cannot create this cache"
        assert llama.llama_n_ctx(self.context) == cells
        self.memory = llama.llama_get_memory(self.context)
        self.cells, self.sequences = cells, sequences
        self.size = min(BATCH, cells)
        self.batch = llama.llama_batch_init(self.size, 0, 1)

    def close(self):
        llama.llama_batch_free(self.batch)
        llama.llama_free(self.context)

    def answer(self, prompts, new):
        """Answer prompts. Returns the new tokens of each."""
        queue = [(i, ids, n) for i, (ids, n) in enumerate(zip(prompts, new, strict=True))]
        free, cells = list(range(self.sequences)), self.cells
        running, answers = [], [[]] * len(prompts)
        while queue or running:
            for entry in list(queue):
                if free and len(entry[1]) + entry[2] <= cells:
                    queue.remove(entry)
                    free.sort()  # only neighbors in the cache share a pass
                    running.append(Running(*entry, free.pop(0)))
                    cells -= running[-1].cells
            self.step(running)
            for one in [one for one in running if len(one.answer) == one.new]:
                answers[one.number] = one.answer
                running.remove(one)
                free.append(one.sequence)
                cells += one.cells
                llama.llama_memory_seq_rm(self.memory, one.sequence, -1, -1)
        return answers

    def step(self, running):
        """Run a batch, and choose the next token of each request whose tokens are all processed."""
        batch, count, last = self.batch, 0, []
        for one in sorted(running, key=lambda one: (len(one.waiting), one.sequence)):
            now = one.waiting[: self.size - count]
            one.waiting = one.waiting[len(now) :]
            for token in now:
                batch.token[count], batch.pos[count] = token, one.seen
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, one.sequence
                batch.logits[count] = False
                one.seen += 1
                count += 1
            if now and not one.waiting:
                batch.logits[count - 1] = True
                last.append((one, count - 1))
        batch.n_tokens = count
        failed = llama.llama_decode(self.context, batch)
        assert not failed, f"llama_decode returned {failed}"
        for one, index in last:
            logits = llama.llama_get_logits_ith(self.context, index)
            one.waiting = [int(numpy.ctypeslib.as_array(logits, (words,)).argmax())]
            one.answer += one.waiting


def padded(tokens):
    return -(-tokens // PAGE) * PAGE


def cache_of(request):
    """(cells, sequences, unified) for a request. If requests share cells, each step goes over the
    cells of all of them, so they share only if that admits more requests at a time."""
    count = len(request["ids"])
    sizes = [len(ids) + n for ids, n in zip(request["ids"], request["tokens"], strict=True)]
    each = padded(max(sizes))
    cells = max(request["cells"] // PAGE, 1) * PAGE if request["cells"] else each * count
    apart = min(cells // each, count)
    unified = apart < min(cells * count // sum(sizes), count)
    return (cells, count, True) if unified else (each * apart, apart, False)


@llama.llama_log_callback
def quiet(level, text, _):
    if level >= 3:  # warnings
        sys.stderr.write(text.decode("utf-8", "replace"))


llama.llama_log_set(quiet, c_void_p(0))
llama.llama_backend_init()
model = llama.llama_model_load_from_file(file.encode(), llama.llama_model_default_params())
assert model, f"llama.cpp cannot load {file}"
words = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
cache = made = None
for line in sys.stdin:
    request = json.loads(line)
    wanted = cache_of(request)
    if wanted != made:
        if cache:
            cache.close()
        cache, made = Cache(*wanted), wanted
    start = time.perf_counter()
    ids = cache.answer(request["ids"], request["tokens"])
    print(json.dumps({"seconds": time.perf_counter() - start, "ids": ids}), flush=True)
