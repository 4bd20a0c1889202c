"""The arguments that users give: one function for each kind checks a value and returns a plain one.

`plain_values` has numbers, flags and names, and needs neither torch nor NumPy. `torch_values` has
token ids, masks, row numbers and devices, and needs torch. Two kinds are built on these: budgets
(`h2o.budgets`) and pins (`h2o.spans`).

Every kind has the same errors. TypeError: the value is of another kind, such as a text or a bool
where a number is expected. ValueError: it is of the right kind, but out of range, empty, without
values (on the device "meta"), or of another shape. A name that is not in its list is a ValueError
too. `docs/reference/arguments.md` says what each kind accepts.
"""
