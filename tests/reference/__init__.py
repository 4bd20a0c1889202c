"""The oracle: what h2o computes, in plain torch, slowly and readably.

Every kernel, backend and cache is compared with it. `operations` has attention, scores, eviction
and simulation; `echo` has the scores and places that a prompt gets by echo.
"""
