"""Timelines: who loads, waits and computes when, by warp and slot.

A traced kernel leaves marks in a buffer (:mod:`flashnumba.machine.timeline.trace`). On a GPU they hold clocks. On the
emulator they hold numbers of events, to which a replay of the launch's log gives times by a stated model
(:mod:`flashnumba.machine.timeline.costs`). Both become a record, which is summed up, drawn, and written as a Chrome
trace.
"""
