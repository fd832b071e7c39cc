"""The live page: what a person sees of a running cluster, in a browser or a terminal.

    Journal, Roster, Metrics ──▶ gauges, history, changes ──▶ Moment ──▶ snapshot (JSON) ──▶ stream ──▶ assets/page.js
                                                                                    └──────────────▶ cli.top

Not here: the socket and who may read (doors.page). Invariant: it only looks; nothing that is served waits for it.
"""
