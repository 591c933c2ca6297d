"""The pytest plugin: `--leakcheck` judges what every test leaves behind."""
