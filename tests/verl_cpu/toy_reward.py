"""Reward with variance within groups, a success label, and a component of its own."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    score = 1.0 if ground_truth in solution_str else 0.0
    score += 0.1 * (len(set(solution_str)) % 7)
    return {"score": score, "acc": float(ground_truth in solution_str), "distinct": len(set(solution_str)) / 80}
