"""All ranks together: which collectives match, how clocks differ, who waits for whom."""
