"""A life that fails is made as short and as plain as it can be, in few lives."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.leakcheck.lives.fuzz import Life, shorten
from lowtide.leakcheck.lives.script import Call, Fault
from lowtide.leakcheck.targets.target import Capabilities

ABLE = Capabilities(
    configs={"graphs": (False, True), "blocks": (8, 16)},
    prompt_lengths=(3, 17, 40),
    max_tokens=6,
    unfinished=True,
    sleep_levels=(1, 2),
    sleep_modes=("wait", "abort"),
    wake_tags=("weights", "kv_cache"),
)
NAMES = ("create", "infer", "sleep", "wake", "reload", "shutdown")


class Engine:
    """Says which lives fail, and counts those that it was asked about."""

    def __init__(self, is_wrong: Callable[[Sequence[Call]], bool]) -> None:
        self.is_wrong = is_wrong
        self.lives: list[Life] = []

    def __call__(self, life: Life) -> Life | None:
        self.lives.append(life)
        # It fails in the first call after which something is wrong.
        ends = range(1, len(life) + 1)
        return next((life[:end] for end in ends if self.is_wrong(life[:end])), None)


def shortened(life: Sequence[Call], is_wrong: Callable[[Sequence[Call]], bool]) -> tuple[Life, Engine]:
    engine = Engine(is_wrong)
    return shorten(life, engine, ABLE), engine


def names(life: Sequence[Call]) -> list[str]:
    return [call.name for call in life]


def calls(*wanted: str) -> list[Call]:
    return [Call(name) for name in wanted]


def has_in_order(*wanted: str) -> Callable[[Sequence[Call]], bool]:
    def is_wrong(life: Sequence[Call]) -> bool:
        left = iter(names(life))
        return all(name in left for name in wanted)

    return is_wrong


@pytest.mark.parametrize("wanted", [("wake",), ("create", "wake"), ("create", "sleep", "wake", "sleep", "wake")])
def test_what_does_not_matter_is_left_out(wanted: tuple[str, ...]) -> None:
    life = calls(*(["create", "infer", "reload", "sleep", "wake", "infer"] * 6))
    found, engine = shortened(life, has_in_order(*wanted))
    assert names(found) == list(wanted)
    assert len(engine.lives) < 90


def test_two_calls_that_need_each_other_go_together() -> None:
    def is_wrong(life: Sequence[Call]) -> bool:
        # As many wakes as sleeps, or the life is out of place.
        said = names(life)
        return "reload" in said and said.count("sleep") == said.count("wake")

    found, _ = shortened(calls("create", "sleep", "infer", "wake", "sleep", "wake", "reload"), is_wrong)
    assert names(found) == ["reload"]


def test_a_life_that_cannot_be_shorter_stays() -> None:
    life = tuple(calls("create", "sleep", "wake"))
    found, engine = shortened(life, lambda asked: tuple(asked) == life)
    assert found == life
    assert len(set(map(repr, engine.lives))) == len(engine.lives), "no life is lived twice"


def test_halves_go_first_then_single_calls_then_pairs_from_the_end() -> None:
    life = tuple(Call(name) for name in "abcde")
    _, engine = shortened(life, lambda asked: tuple(asked) == life)
    asked = ["".join(names(each)) for each in engine.lives]
    assert asked == [
        "abcde",
        *("abc", "ade"),
        *("abcd", "abce", "abde", "acde", "bcde"),
        # Without d and e, and without b and c, were asked about above.
        *("abe", "abd", "ace", "acd", "cde", "bde", "bce", "bcd"),
    ]


def test_where_a_part_was_left_out_it_goes_on_before_it() -> None:
    life = [Call(name) for name in "abcdefgh"]
    found, engine = shortened(life, has_in_order("a", "h"))
    assert names(found) == ["a", "h"]
    asked = ["".join(names(each)) for each in engine.lives]
    assert asked == ["abcdefgh", "abcd", "efgh", "abcdef", "abcdgh", "abgh", "gh", "abg", "abh", "ah", "h", "", "a"]


FULL = Call("create", {"config": {"graphs": True, "blocks": 16}})


@pytest.mark.parametrize(
    ("call", "needed", "plainest"),
    [
        (FULL, lambda call: True, Call("create")),
        (
            FULL,
            lambda call: call.arguments.get("config", {}).get("graphs"),
            Call("create", {"config": {"graphs": True}}),
        ),
        (
            Call("infer", {"prompt_lengths": [40, 17, 40], "max_tokens": 6}),
            lambda call: True,
            Call("infer", {"prompt_lengths": [3], "max_tokens": 1}),
        ),
        (
            Call("infer", {"prompt_lengths": [40, 17, 40], "max_tokens": 6}),
            lambda call: max(call.arguments["prompt_lengths"]) >= 17 and call.arguments["max_tokens"] >= 3,
            Call("infer", {"prompt_lengths": [17], "max_tokens": 3}),
        ),
        (Call("sleep", {"level": 2, "mode": "abort"}), lambda call: True, Call("sleep", {"level": 1, "mode": "wait"})),
        (
            Call("sleep", {"level": 2, "mode": "abort"}),
            lambda call: call.arguments["level"] == 2,
            Call("sleep", {"level": 2, "mode": "wait"}),
        ),
        (Call("wake", {"tags": ["weights"]}), lambda call: True, Call("wake")),
        (Call("abort", {"count": 3}), lambda call: True, Call("abort", {"count": 1})),
        (Call("wake", fault=Fault("map", 7)), lambda call: True, Call("wake")),
        (Call("wake", fault=Fault("map", 7)), lambda call: call.fault is not None, Call("wake", fault=Fault("map", 0))),
        (
            Call("wake", fault=Fault("map", 7)),
            lambda call: call.fault is not None and call.fault.at and call.fault.at >= 3,
            Call("wake", fault=Fault("map", 3)),
        ),
    ],
)
def test_arguments_are_as_plain_as_can_be(call: Call, needed: Callable[[Call], object], plainest: Call) -> None:
    found, _ = shortened([call], lambda life: any(other.name == call.name and needed(other) for other in life))
    assert found == (plainest,)


def slow(life: Life) -> bool:
    return any(call.arguments.get("config", {}).get("graphs") for call in life)


@pytest.mark.parametrize(("needs_fault", "lives_with_graphs"), [(False, 0), (True, 1)])
def test_settings_that_do_not_matter_go_before_anything_else(needs_fault: bool, lives_with_graphs: int) -> None:
    """They may make every life that follows slow."""
    sleep = Call("sleep", fault=Fault("map", 3) if needs_fault else None)
    life = [FULL, *calls("infer", "shutdown"), FULL, *calls("reload", "wake"), sleep]
    right = has_in_order("create", "sleep")
    found, engine = shortened(
        life, lambda asked: right(asked) and (not needs_fault or any(call.fault for call in asked))
    )
    assert names(found) == ["create", "sleep"]
    assert sum(map(slow, engine.lives)) == lives_with_graphs


def test_a_setting_that_matters_stays_and_the_others_go() -> None:
    life = [FULL, *calls("infer", "reload", "wake"), FULL, *calls("sleep")]
    right = has_in_order("create", "sleep")
    found, engine = shortened(life, lambda asked: right(asked) and slow(tuple(asked)))
    assert found == (Call("create", {"config": {"graphs": True}}), Call("sleep"))
    with_both = [asked for asked in engine.lives if any("blocks" in c.arguments.get("config", {}) for c in asked)]
    assert len(with_both) <= 2


def test_arguments_do_not_cost_a_search_for_shorter_lives_each() -> None:
    life = [FULL, *calls(*["sleep", "wake"] * 8), Call("infer", {"prompt_lengths": [40, 40, 40], "max_tokens": 6})]
    found, engine = shortened(life, lambda asked: len(asked) == len(life))
    assert len(found) == len(life)
    parts, pairs, plainer = 4 * len(life), len(life) ** 2 // 2, 30
    # Once with the arguments as they were, once with those that are left.
    assert len(engine.lives) < 2 * (parts + pairs) + plainer


@settings(max_examples=150)
@given(data=st.data())
@pytest.mark.nightly
def test_no_call_and_no_two_calls_can_be_left_out_of_what_comes_out(data: st.DataObject) -> None:
    life = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=14))
    places = data.draw(st.sets(st.integers(0, len(life) - 1), min_size=1))
    is_wrong = has_in_order(*(life[place] for place in sorted(places)))
    found, engine = shortened(calls(*life), is_wrong)
    assert is_wrong(found)
    for first in range(len(found)):
        for second in range(first, len(found)):
            left = [call for place, call in enumerate(found) if place not in (first, second)]
            assert engine(tuple(left)) is None


def test_of_several_prompts_any_one_may_be_the_one_that_matters() -> None:
    def is_wrong(life: Sequence[Call]) -> bool:
        return any(17 in call.arguments.get("prompt_lengths", ()) for call in life)

    for lengths in ([17, 40, 40], [40, 17, 40], [40, 40, 17]):
        found, _ = shortened([Call("infer", {"prompt_lengths": lengths, "max_tokens": 1})], is_wrong)
        assert found == (Call("infer", {"prompt_lengths": [17], "max_tokens": 1}),)


def test_a_plainer_call_leaves_those_after_it_alone() -> None:
    life = [Call("wake", {"tags": ["weights"]}), *calls("infer", "reload", "shutdown")]
    wanted = ["wake", "infer", "reload", "shutdown"]
    found, engine = shortened(life, lambda asked: names(asked) == wanted)
    assert names(found) == wanted
    assert found[0] == Call("wake")
    # What is plain already is not asked about again.
    assert len(set(map(repr, engine.lives))) == len(engine.lives)


def simpler(call: Call) -> list[Call]:
    """What is asked about instead of a call, as long as nothing else fails."""
    _, engine = shortened([call], lambda asked: tuple(asked) == (call,))
    # The whole life, and without its settings and faults.
    return [life[0] for life in engine.lives if life != (call,)]


def test_of_a_request_each_prompt_and_its_tokens_are_made_less() -> None:
    def asked(lengths: list[int], tokens: int) -> Call:
        return Call("infer", {"prompt_lengths": lengths, "max_tokens": tokens})

    assert simpler(asked([40, 17], 4)) == [
        *(asked([17], 4), asked([3, 17], 4), asked([17, 17], 4)),
        *(asked([40], 4), asked([40, 3], 4)),
        *(asked([40, 17], 1), asked([40, 17], 3)),
    ]
    assert simpler(asked([3], 2)) == [asked([3], 1)]
    assert simpler(asked([3], 1)) == []


def test_of_a_fault_none_the_first_and_the_one_before_are_tried() -> None:
    def failing(at: int) -> Call:
        return Call("step", fault=Fault("copy", at))

    assert simpler(failing(5)) == [Call("step"), failing(0), failing(4)]
    assert simpler(failing(1)) == [Call("step"), failing(0)]
    assert simpler(failing(0)) == [Call("step")]


def test_of_settings_all_go_then_each() -> None:
    def made(**config: object) -> Call:
        return Call("create", {"config": config} if config else {})

    assert simpler(made(graphs=True, blocks=16)) == [made(), made(blocks=16), made(graphs=True)]


def test_of_a_sleep_a_wake_and_an_abort_the_plainest_are_tried() -> None:
    def asleep(level: int, mode: str) -> Call:
        return Call("sleep", {"level": level, "mode": mode})

    assert simpler(asleep(2, "abort")) == [asleep(1, "abort"), asleep(2, "wait")]
    assert simpler(asleep(1, "wait")) == []
    assert simpler(Call("wake", {"tags": ["weights"]})) == [Call("wake")]
    assert simpler(Call("abort", {"count": 2})) == [Call("abort", {"count": 1})]
    assert simpler(Call("abort", {"count": 1})) == []


def test_every_call_of_a_life_is_made_plainer() -> None:
    sleep = Call("sleep", {"level": 2, "mode": "abort"})
    found, _ = shortened(
        [sleep, Call("wake", {"tags": ["weights"]}), sleep],
        lambda asked: names(asked) == ["sleep", "wake", "sleep"],
    )
    plain = Call("sleep", {"level": 1, "mode": "wait"})
    assert found == (plain, Call("wake"), plain)


def test_a_setting_that_only_one_create_needs_goes_from_the_other() -> None:
    with_graphs = Call("create", {"config": {"graphs": True}})
    found, _ = shortened(
        [with_graphs, Call("shutdown"), with_graphs],
        lambda asked: names(asked) == ["create", "shutdown", "create"] and slow((asked[-1],)),
    )
    assert found == (Call("create"), Call("shutdown"), with_graphs)
