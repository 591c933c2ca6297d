"""Commands that show what runs and programs have written."""
