"""The measurement kit: clocks, turns, records, tables, pictures and progress, for everything that measures."""
