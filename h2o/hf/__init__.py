"""The cache and the attention function for Hugging Face transformers. `h2o.ops` needs neither.

transformers calls `attention`, which passes each call to a layer (`layers`) of the `cache`. The
layer attends, scores keys (`prompt`), evicts and stores. `cache_state` is what remains between
forward passes. `model_traits` and `rotary` contain what differs between models, and `support` says
which models are supported. `patch` enables H2O for code that never names a cache, `batching`
answers many prompts, `chat` finds the ids of turns, `document` compresses one text, and
`simulation` computes in one forward pass what a cache would compute token by token.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens, S slots, K keys held, N
columns, D head dimension. A column is an index in the padded batch. A position is a token's index
in its own row, not counting padding.
"""
