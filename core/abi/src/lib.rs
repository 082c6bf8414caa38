//! What crosses the plugin boundary: plain types and hook traits. No logic.
