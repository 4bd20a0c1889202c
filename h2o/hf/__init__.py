"""The cache and the attention function for Hugging Face transformers; `h2o.ops` works without.

transformers calls `attention`, which hands each call to a layer (`layers`) of the `cache`. The
layer attends, scores (`prompt`), evicts and stores (`store`). `families` and `rotary` know what
differs between models, `support` which models are served. `patch` switches all of it on for code
that never names a cache, `batching` answers many prompts, `document` compresses one text, and
`simulation` computes from one forward pass what a cache would give token by token.
"""
