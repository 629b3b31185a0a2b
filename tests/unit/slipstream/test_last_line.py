"""The output of daemons in a file, and the line below it."""

import io

from rich.console import Console

from slipstream.last_line import last_line, pause_s


def test_a_file_gets_the_line_below_all_others_seldom() -> None:
    file = io.StringIO()
    console = Console(file=file, highlight=False, soft_wrap=True)
    with last_line(console) as (show, update):
        show("trainer", "step 1/3")
        update("step 1 of 3")
    assert file.getvalue() == "trainer    | step 1/3\nslipstream | step 1 of 3\n"
    assert pause_s(console) == 30.0
