"""The page of a life that is still running: what it has gone through so far, which events then add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowtide.reports.escaping import one_line
from lowtide.reports.html.jinja_environment import environment
from lowtide.reports.html.life_pictures import draw_life
from lowtide.reports.html.scripts import drawing, following, security_policy, unpacking
from lowtide.reports.html.trends import draw_trends
from lowtide.reports.schema import Subject

if TYPE_CHECKING:
    from lowtide.reports.live.broadcast import LiveLife


def render_live(life: LiveLife | None, problem: str = "") -> str:
    """Return the page while a life runs.

    Args:
        life: as far as it has come; None where it has not begun.
        problem: what is wrong with the report that is there; empty if none is there.
    """
    from markupsafe import Markup

    run = (*unpacking(), *drawing(), *following())
    return (
        environment()
        .get_template("live.html.j2")
        .render(
            policy=Markup(security_policy(run, connects=True)),
            scripts=[Markup(text) for text in run],
            life=life,
            problem=problem,
        )
    )


def describe_life(life: LiveLife) -> dict[str, Any]:
    """Return what an event says of a life: the stage that is running, and the pictures so far."""
    return {
        "now": one_line(life.now),
        "life": draw_life(life.stages),
        "trends": draw_trends(Subject(id="", outcome="clean", stages=life.stages)),
    }
