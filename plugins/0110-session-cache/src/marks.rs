//! Where a prompt's prefill leaves snapshots.

use crate::keys::PAGE;

/// The settings.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// Tokens from one periodic mark to the next; 0 for none.
    pub every: u32,
    /// Tokens that a mark must lie past the resume point.
    pub fork_min: u32,
}

impl Rules {
    /// Marks of a prompt of `tokens` that resumes at `resumed` and has `common` tokens in common with something stored:
    /// position and reason, ascending. `grid`: multiples at which its states may be kept.
    pub fn marks(&self, tokens: u32, resumed: u32, grid: u32, common: u32) -> Vec<(u32, &'static str)> {
        let grid = grid.max(1);
        let step = if grid > 1 { grid } else { PAGE as u32 };
        let limit = tokens / grid * grid;
        let first = resumed.saturating_add(self.fork_min);
        let may = |at: u32| at > resumed && at < limit && at >= first;
        let mut marks = Vec::new();
        let fork = common.min(limit) / step * step;
        if may(fork) {
            marks.push((fork, "fork"));
        }
        let every = (self.every / step * step).max(step);
        if self.every > 0 {
            let from = first.max(1).checked_next_multiple_of(every).unwrap_or(limit);
            let multiples = (from..limit).step_by(every as usize).filter(|at| may(*at));
            marks.extend(multiples.map(|at| (at, "periodic")));
        }
        if limit < tokens && limit > resumed {
            // The end of such a prompt is no point at which its state may be kept.
            marks.push((limit, "prompt"));
        }
        marks.sort_by_key(|m| m.0);
        marks.dedup_by_key(|m| m.0);
        marks
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(rules: Rules, tokens: u32, resumed: u32, grid: u32, common: u32) -> Vec<(u32, &'static str)> {
        rules.marks(tokens, resumed, grid, common)
    }

    #[test]
    fn a_fork_far_enough_past_the_resume_point_is_marked() {
        let rules = Rules { every: 0, fork_min: 512 };
        assert_eq!(at(rules, 2000, 0, 1, 600), [(512, "fork")], "at the page");
        assert_eq!(at(rules, 2000, 0, 64, 600), [(576, "fork"), (1984, "prompt")], "at the grid point");
        assert_eq!(at(rules, 2000, 0, 1, 511), [], "too near");
        assert_eq!(at(rules, 2000, 0, 64, 511), [(1984, "prompt")]);
        assert_eq!(at(rules, 2000, 100, 1, 700), [], "the page before it is too near");
        assert_eq!(at(rules, 2000, 100, 64, 700), [(640, "fork"), (1984, "prompt")]);
        assert_eq!(at(rules, 600, 0, 1, 600), [(512, "fork")]);
        assert_eq!(at(rules, 512, 0, 1, 512), [], "the end has a snapshot anyway");
    }

    #[test]
    fn long_prompts_are_marked_at_multiples() {
        let rules = Rules { every: 1000, fork_min: 1 };
        let periodic = |positions: &[u32]| positions.iter().map(|at| (*at, "periodic")).collect::<Vec<_>>();
        assert_eq!(at(rules, 2400, 0, 1, 0), periodic(&[768, 1536, 2304]), "rounded down to pages");
        assert_eq!(at(rules, 2304, 768, 1, 0), periodic(&[1536]));
        assert_eq!(at(Rules { every: 1, ..rules }, 600, 0, 1, 0), periodic(&[256, 512]));
        assert_eq!(at(Rules { every: 0, ..rules }, 99_999, 0, 1, 0), []);
        assert_eq!(at(Rules { every: 256, fork_min: 512 }, 1100, 256, 1, 0), periodic(&[768, 1024]));
        assert_eq!(at(Rules { every: u32::MAX, fork_min: u32::MAX }, 99_999, 9, 1, 9), []);
    }
}
