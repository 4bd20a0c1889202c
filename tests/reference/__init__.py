"""The oracle: the definition of correct results, in plain torch, slow and readable.

Every kernel, backend and cache is compared with it. `operations` defines attention, scores,
eviction and simulation. `echo` defines the scores that echo gives to a prompt's keys and the
budgets that it gives to heads.
"""
