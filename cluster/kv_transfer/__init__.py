"""Moves the KV of a prompt to the worker that goes on with it. The life of one attempt's handoff, on all three sides:

    gateway: attempt          prefill worker: lease             decode worker: intake

    prefill asked ──────────► offered     a live sequence's
      │ offer                   │         blocks
    decode asked ───────────────┼─────────────────────────────► reserved    blocks wait for KV
      │                         │                                 │         (no room: declined, and another worker is asked)
      │                         │ ◄── follow, read to the mark ── reading   a plane writes to the blocks
      │ first token             ▼                                 │
      │                       readable    leased blocks,          │
      │                         │         until a deadline        │
      │                         │ ◄──── renew, read the rest ──── reading
      │                         │ ◄── Release(digest, taker) ──── committing  nothing writes to them any more
      │                         ▼                                 │
      │                       taken ─────────── VALID ──────────► ▼
    decoding                  free                              running     a live sequence's blocks

Without overlap decode is asked after the first token, and reads all at once.

What else happens, and what becomes of the blocks:

    what happens                       of the prefill worker                  of the decode worker
    the client or the gateway leaves   withdrawn: free                        free, once no read writes to them
    decode declines                    stay as they are                       none were taken
    the first token is the last        free at once                           the follower hears that the offer is over: free
    the lease's time is up             expired: free                          Release is STALE: free
    a read fails, or brings damage     stay, until the gateway gives up       free, once the read has ended
    the answer to Release is lost      taken: free                            the same taker asks again, and hears the same
    the prefill worker dies            gone; its successor knows no ticket    the read, or Release, fails: free
    the decode worker dies             leased until the deadline              gone
    one leg of an attempt fails        the gateway ends the other; the next attempt has a ticket of its own

Four rules hold in every state, and `tests/handoff` plays all of it in any order against them:

1. No step before VALID. It says that until then the ticket's blocks held the ticket's KV, and it is said to one taker alone.
2. What is written is not reused. Reserved blocks stay so until `Connection.read` has ended, and that ends only when nothing writes to
   them any more, also when it was cancelled or has failed: the quarantine is the read's own end, so there is no list of suspects.
3. What is read may be reused. The end of a lease does not wait for readers, or prompts would wait for the slowest peer. A reader that is
   overtaken by it may have read another prompt's KV; it is told STALE, and drops what it read.
4. Whoever ends first, each side frees its own blocks by itself: by the end of its call, or by the deadline.

The halves: `prefill_worker.outbox` and `decode_worker.intake`; between them `router.gateway.handoff`. How bytes move: `base`.
"""
