"""verify: the provider of each candidate, and its proofs, before anything is patched."""

from __future__ import annotations

import itertools

import torch

from diffkern.injection.planning import ALREADY_PATCHED, BY_CONFIG, Candidate
from diffkern.injection.report import ONLY_EAGER, InjectionReport, Site
from diffkern.injection.state import STOCK, PatchState, only_eager
from diffkern.providers import KERNEL_DTYPES, NoProviderError
from diffkern.rewrite import DISAGREES
from diffkern.verify.measures import Measurement
from diffkern.verify.proof import Verifier

#: Part of the reason for which a forward is left alone that holds what a configuration speaks of.
_CONFIGURED = " is inside, and config "


class InjectionError(RuntimeError):
    """A strict injection met something it would have had to fall back from. Nothing was changed."""


def choose_provider(candidate: Candidate, report: InjectionReport) -> bool:
    """Takes the first way for which there is a provider that can gain something; returns whether there is one."""
    site, device = candidate.site, candidate.devices[0]
    while True:
        provider = candidate.provider(device)
        site.op, site.how = candidate.fusion.op, candidate.options[0].how
        if provider == STOCK:
            site.provider, site.reason = None, f"config leaves it alone on {device.type}, and not elsewhere"
            return True
        try:
            choice = candidate.fusion.choose(candidate.module, provider, device, candidate.dtypes[0])
        except NoProviderError as error:
            if not _has_another(candidate, str(error), report._rejected):
                return False
            continue
        plain = only_eager(candidate.fusion, choice, provider, device, candidate.dtypes[0])
        if plain is None:
            break
        if not _has_another(candidate, plain, report.skipped):
            return False
    site.provider = choice.provider
    site.reason = "; ".join(filter(None, (*candidate.refused, choice.describe())))
    candidate.choice_is_fallback |= choice.is_fallback
    return True


def _has_another(candidate: Candidate, reason: str, left_alone: list[Site]) -> bool:
    """Gives up the best way of a candidate, which is left alone if that was the last one."""
    another = candidate.refuse(reason)
    if not another:
        candidate.site.reason = "; ".join(candidate.refused)
        left_alone.append(candidate.site)
    return another


def verify_candidates(candidates: list[Candidate], verifier: Verifier, report: InjectionReport) -> list[Candidate]:
    """Proves every candidate, the next way where one fails; returns those that keep the contract."""
    kept = []
    for candidate in candidates:
        state = candidate.state
        while broken := _prove(candidate, state, verifier):
            reason = "; ".join(dict.fromkeys(f"{proof.dtype} on {proof.device}: {proof.reason}" for proof in broken))
            if len(candidate.options) > 1:
                reason = f"{candidate.site.provider}: {reason}"
            matched = any(DISAGREES not in proof.reason for proof in broken)
            left_alone = report._rejected if matched else report.skipped
            if not (_has_another(candidate, reason, left_alone) and choose_provider(candidate, report)):
                break
            state.fusion, state.rule = candidate.options[0].fusion, candidate.options[0].rule
        else:
            kept.append(candidate)
            _prove_casts(candidate, state, verifier)
    return kept


def _prove(candidate: Candidate, state: PatchState, verifier: Verifier) -> list[Measurement]:
    """Proves a module as it is, wherever it will probably run; returns the proofs that failed."""
    candidate.site.measurements.clear()
    for device, dtype in itertools.product(candidate.devices, candidate.dtypes):
        provider = candidate.provider(device)
        if provider == STOCK:
            continue
        if candidate.fusion.proves_itself:
            candidate.site.measurements += candidate.fusion.prove_ahead(candidate.module, provider, device, dtype)
            continue
        with torch.no_grad():
            proof = verifier.prove(candidate.module, candidate.fusion, provider, device, dtype)
        if proof is not None:
            candidate.site.measurements.append(proof)
            if proof.passed:
                state.trust(candidate.module, device, dtype)
    broken = [proof for proof in candidate.site.measurements if not proof.passed]
    if not broken:  # then parts of a forward may stay as they are written; the others are what is patched
        site, refused = candidate.site, candidate.fusion.refused()
        site.reason = "; ".join(filter(None, (site.reason, *[f"{name}: {reason}" for name, reason in refused.items()])))
        candidate.choice_is_fallback |= bool(refused)
    return broken


def _prove_casts(candidate: Candidate, state: PatchState, verifier: Verifier) -> None:
    """Proves what casting the model makes of a module: a graph of ``torch.compile`` has no room for a proof."""
    for device, dtype in itertools.product(candidate.devices, sorted(KERNEL_DTYPES, key=str)):
        provider = candidate.provider(device)
        with torch.no_grad():
            try:
                cast = candidate.fusion.cast(candidate.module, dtype)
            except Exception:  # of weights that cannot be cast; the first call proves what became of them
                return
            if cast is None or provider == STOCK:
                continue
            proof = verifier.prove(cast, candidate.fusion, provider, device, dtype)
            if proof is not None and proof.passed:
                state.trust(cast, device, dtype)


def refuse_fallbacks(candidates: list[Candidate], report: InjectionReport) -> None:
    """Raises for a strict injection unless everything that was asked for runs, with its first choice.

    Raises:
        InjectionError: something was left alone, failed its proof, or has another provider.
    """
    left = [site for site in report.skipped if site.op is not None and site.reason not in (ALREADY_PATCHED, BY_CONFIG)]
    # An op inside of a forward that no kernel computes on this device was written so, and what the configuration says
    # of a norm inside is asked for: neither is a fall back. Nor is what only looks like a rule.
    left = [
        site
        for site in left
        if site.how != "source" or not any(words in site.reason for words in (ONLY_EAGER, _CONFIGURED, DISAGREES))
    ]
    problems = [f"{site.path or site.class_name}: {site.reason}" for site in (*report.failed, *left)]
    problems += [
        f"{c.site.path or c.site.class_name}: served by {c.site.provider} ({c.site.reason})"
        for c in candidates
        if c.choice_is_fallback
    ]
    if problems:
        more = f" (and {len(problems) - 5} more)" if len(problems) > 5 else ""
        raise InjectionError("strict injection refused, nothing was changed: " + "; ".join(problems[:5]) + more)
