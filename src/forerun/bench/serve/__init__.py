"""A server under load, from outside: arrivals, latencies, goodput and acceptance, over OpenAI's HTTP interface."""
