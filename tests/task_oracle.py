"""The task table in plain Python, from a schedule: what csrc/task_build must write."""

from __future__ import annotations

from msa_ext.schedule import MSABackwardSchedule


def build_tasks(
    schedule: MSABackwardSchedule, group: int, window_log2: int
) -> tuple[list[tuple[int, int, int, int]], list[list[int]]]:
    """Headers (workspace_block, index_head, position_offset, num_queries) and tokens of every task, in order."""
    s = schedule.to("cpu")
    slots = 128 // group
    offsets = [0] * s.num_entries if s.query_offsets is None else s.query_offsets.tolist()
    starts, cu = s.document_workspace_starts.tolist(), s.cu_seqlens.tolist()
    tasks = []
    for head, row, begin, count, entry, block in s.scheduler_metadata[: int(s.work_count)].tolist():
        first = int(s.row_ptr[head, row]) + begin
        tokens = (cu[entry] + s.q_indices[head, first : first + count]).tolist()
        workspace_block = starts[entry] // 128 + block
        position_offset = starts[entry] + offsets[entry] - cu[entry]
        for i in range(0, count, slots):
            part = tokens[i : i + slots]
            key = (head, part[0] >> window_log2, workspace_block, part[0])
            header = (workspace_block, head, position_offset, len(part))
            tasks.append((key, header, part + [-1] * (slots - len(part))))
    tasks.sort(key=lambda task: task[0])
    return [task[1] for task in tasks], [task[2] for task in tasks]
