"""tqdm#1564: the monitor's thread stays after the bar is closed (4.70.1); made once, so listed only."""

import tqdm


def test_bar():
    with tqdm.tqdm(total=2) as bar:
        bar.update(2)
