"""`twinserve profiles`: what hardware and models the simulator knows."""

from __future__ import annotations

import cyclopts

from ..profiles.profile import list_profiles, load_profile

profiles_app = cyclopts.App(name="profiles", help="Hardware and model profiles.")


@profiles_app.command(name="list")
def list_() -> None:
    """The shipped profiles, one a line. Others are derived on demand: MODEL@GPU[:tpN]."""
    for name in list_profiles():
        print(load_profile(name).describe())


@profiles_app.command
def show(name: str) -> None:
    """A profile in full, as JSON.

    Parameters
    ----------
    name: str
        Shipped profile, MODEL@GPU[:tpN], or a file.
    """
    print(load_profile(name).model_dump_json(indent=2))
