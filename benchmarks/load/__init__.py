"""The load generator: what is asked, when it is sent, what came back, and what that says. `benchmarks.serve` composes it.

lengths, requests   what is asked
arrivals, driver    when it is sent
transport           to whom: http (OpenAI's), grpc and its channels (Baton's); another protocol is another `Transport`
answer, trace       what came back, and when
statistics, slo, search, plot   what it says
"""
