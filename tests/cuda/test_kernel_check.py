"""The check of kernels against the torch backend: what it tolerates, and what it reports."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from h2o import backends
from h2o.backends import kernel_check
from tests.cuda.test_serving import check_small


def test_the_cpus_kernels_pass_the_check():
    assert kernel_check.mistakes(backends.core, backends._torch_backend(), "cpu") == []


@pytest.mark.parametrize("case", kernel_check.CASES, ids=lambda case: case.name)
def test_rounding_changes_no_choice(case, monkeypatch):
    """The check must tolerate queries rounded like TF32, which keeps 10 of float32's 23 fraction
    bits."""

    def rounded(name):
        def run(*arguments):
            query = arguments[0]
            if name != "evict":
                query = (query.float().view(torch.int32) & -8192).view(torch.float32)
            getattr(backends.core, name)(query.to(arguments[0].dtype), *arguments[1:])

        return run

    coarse = SimpleNamespace(**{name: rounded(name) for name in backends.OPERATIONS})
    monkeypatch.setattr(kernel_check, "CASES", (case,))
    assert kernel_check.mistakes(coarse, backends._torch_backend(), "cpu") == []


SETTINGS = torch.backends.cuda.matmul


@pytest.mark.skipif(not hasattr(SETTINGS, "fp32_precision"), reason="before torch 2.9")
@pytest.mark.parametrize("settings", [SETTINGS, torch.backends], ids=["cuda", "common"])
def test_the_check_sets_the_precision_of_products_and_puts_it_back(settings, monkeypatch):
    """The check needs exact products. It must restore the user's setting, even if the setting may
    not be read by its older name, or if a common setting determines it."""
    check_small(monkeypatch, kernel_check.SHORT)
    seen = set()

    def attend(*arguments):
        seen.add(SETTINGS.fp32_precision)
        backends.core.attend(*arguments)

    kernels = SimpleNamespace(**vars(backends.core) | {"attend": attend})
    before = SETTINGS.fp32_precision, torch.backends.fp32_precision
    try:
        settings.fp32_precision = "tf32"
        assert kernel_check.mistakes(kernels, backends._torch_backend(), "cpu") == []
        assert (seen, SETTINGS.fp32_precision) == ({"ieee"}, "tf32")
        settings.fp32_precision = "ieee"
        assert SETTINGS.fp32_precision == "ieee"
    finally:
        SETTINGS.fp32_precision, torch.backends.fp32_precision = before


FORGOTTEN = {
    "decay": ("attend", 9, lambda policy: policy._replace(decay=1.0)),
    "scale": ("step", 6, lambda scale: 0.5),
    "sinks": ("evict", 5, lambda policy: policy._replace(sinks=0)),
    "mask": ("attend", 3, lambda mask: None),
    "softcap": ("attend", 7, lambda softcap: 0.0),
}


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_kernels_forget_shows(what):
    operation, place, without = FORGOTTEN[what]

    def forgetful(*arguments):
        arguments = [*arguments[:place], without(arguments[place]), *arguments[place + 1 :]]
        getattr(backends.core, operation)(*arguments)

    kernels = SimpleNamespace(**vars(backends.core))
    setattr(kernels, operation, forgetful)
    mistakes = kernel_check.mistakes(kernels, backends._torch_backend(), "cpu")
    assert any(text.startswith(f"{operation} gets") for text in mistakes)


def test_cases_cover_what_there_is():
    assert {case.dtype for case in kernel_check.CASES} == kernel_check.TOLERANCE.keys()
    for field in dataclasses.fields(kernel_check.Case):
        assert len({getattr(case, field.name) for case in kernel_check.CASES}) > 1, field.name
