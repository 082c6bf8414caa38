//! Which class of matrices is stored how.

use std::sync::{Arc, PoisonError, RwLock};

use plugfold_0001_exl3_nonexpert_q4_api::{Assigned, CLASSES, WeightClasses, class_of};
use plugfold_abi::points::Matrix;
use plugfold_abi::{List, OpError, Text, TextBuf};

use crate::BF16;
use crate::encode::Range;

/// Modes of all classes, shared by the builders and whoever asks. Another plugin may put its own table in force before
/// weights are loaded.
#[derive(Clone, Default)]
pub struct Table(Arc<RwLock<State>>);

#[derive(Default)]
struct State {
    modes: Vec<Assigned>,
    /// Who assigned them; empty: this plugin's own setting.
    owner: String,
}

impl Table {
    fn read<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn put(&self, owner: &str, modes: Vec<Assigned>) {
        let mut state = self.0.write().unwrap_or_else(PoisonError::into_inner);
        *state = State { modes, owner: owner.into() };
    }

    /// One mode for all classes.
    pub fn all(&self, mode: &str) {
        self.put("", vec![Assigned { main: mode.into(), mtp: mode.into() }; CLASSES.len()]);
    }

    /// The mode of a class.
    pub fn mode_of(&self, class: usize, mtp: bool) -> Option<String> {
        self.read(|s| s.modes.get(class).map(|m| if mtp { m.mtp.to_string() } else { m.main.to_string() }))
    }

    /// The mode of a matrix; nothing for those that no class has.
    pub fn mode_for(&self, matrix: &Matrix<'_>) -> Option<String> {
        self.mode_of(class_of(&matrix.role)?, matrix.mtp)
    }

    /// The mode's name where all classes have one, else `map:` and the sorted table.
    pub fn name(&self) -> String {
        self.read(|s| {
            let classes = || CLASSES.iter().zip(&s.modes);
            let mut all = classes().flat_map(|(c, m)| [Some(&m.main), c.mtp.then_some(&m.mtp)]).flatten();
            let first = all.next().cloned().unwrap_or_default();
            if all.all(|mode| *mode == first) {
                return first.to_string();
            }
            let main = classes().map(|(c, m)| format!("{}={}", c.name, m.main));
            let mtp = classes().filter(|(c, _)| c.mtp).map(|(c, m)| format!("mtp.{}={}", c.name, m.mtp));
            let mut table: Vec<String> = main.chain(mtp).collect();
            table.sort_unstable();
            format!("map:{}", table.join(","))
        })
    }

    /// A mode that neither this plugin knows nor anybody else put there.
    pub fn unknown(&self) -> Option<String> {
        let known = |mode: &str| mode == BF16 || Range::of(mode).is_some();
        self.read(|s| {
            let mut modes = s.modes.iter().flat_map(|m| [&m.main, &m.mtp]);
            modes.find(|m| s.owner.is_empty() && !known(m)).map(ToString::to_string)
        })
    }
}

impl WeightClasses for Table {
    fn mode(&self, class: u32, mtp: bool) -> Result<TextBuf, OpError> {
        let mode = self.mode_of(class as usize, mtp);
        mode.map(Into::into)
            .ok_or_else(|| OpError::invalid(format!("class {class}: there are {}", CLASSES.len())))
    }

    fn key(&self) -> Result<TextBuf, OpError> {
        Ok(self.name().into())
    }

    fn all_bf16(&self) -> Result<bool, OpError> {
        Ok(self.name() == BF16)
    }

    fn assign(&self, owner: Text<'_>, table: List<Assigned>) -> Result<(), OpError> {
        if table.len() != CLASSES.len() {
            let (got, want) = (table.len(), CLASSES.len());
            return Err(OpError::new(format!("{owner} assigns modes to {got} classes, there are {want}")));
        }
        self.put(owner.get_str(), table.into());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(change: impl Fn(&mut Vec<Assigned>)) -> Table {
        let mut modes = vec![Assigned { main: "q4".into(), mtp: "q4".into() }; CLASSES.len()];
        change(&mut modes);
        let table = Table::default();
        table.assign(Text::from("0470"), modes.into()).unwrap();
        table
    }

    #[test]
    fn a_table_of_one_mode_has_its_name_and_others_are_sorted() {
        assert_eq!(table(|_| {}).name(), "q4");
        // What the multi-token-prediction layer has not does not count.
        assert_eq!(table(|m| m[0].mtp = "q8".into()).name(), "q4");
        let mixed = table(|m| {
            m[15].main = "q8".into();
            m[14].mtp = "bf16".into();
        });
        let name = mixed.name();
        assert!(name.starts_with("map:dense_down=q4,") && name.contains(",lm_head=q8,"), "{name}");
        assert!(name.contains(",mtp.mtp_eh=bf16,") && name.contains(",mtp_eh=q4,"), "{name}");
        assert_eq!(mixed.unknown(), None, "assigned by another plugin");
        assert_eq!(
            (mixed.mode(15, false).unwrap(), mixed.mode(15, true).unwrap()),
            ("q8".into(), "q4".into())
        );
        assert!(mixed.mode(16, false).is_err());
    }

    #[test]
    fn every_class_in_bf16_is_what_the_automatic_policy_asks_for() {
        for (mode, plain) in [("bf16", true), ("q4", false), ("q4mse", false)] {
            let table = Table::default();
            table.all(mode);
            assert_eq!(table.all_bf16(), Ok(plain));
            assert_eq!(table.key().unwrap(), mode);
        }
        let short = Table::default().assign(Text::from("x"), List::new());
        assert!(short.unwrap_err().to_string().contains("16"));
    }
}
