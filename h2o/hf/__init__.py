"""The cache and the attention function for Hugging Face transformers; `h2o.ops` works without.

`attention` is the attention function registered as "h2o"; it makes each call a record
(`attention_call`) and passes it to a `layer` of the `cache`, which attends, evicts and stores.
`patch` switches all of it on for code that never names a cache. `simulation` computes from one
forward pass what a cache would give token by token, by way of `attention_hook`. `support` says
which models are served; `kept`, `trace` and `report` show what was kept and evicted; `cache_file`
saves a cache. Users find all of it under `h2o` itself.
"""
