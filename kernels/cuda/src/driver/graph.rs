//! Graphs: what a stream was asked for, recorded.

use std::sync::Arc;

use cudarc::driver::sys;

use super::Context;
use super::calls::call;
use crate::error::CudaError;

/// Records what the stream is asked for from now on.
pub(super) fn begin(stream: sys::CUstream) -> Result<(), CudaError> {
    // Other threads may go on with the device: nothing of theirs is recorded, nor does it end the recording.
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream lives; the context is current.
    call("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream, mode) })
}

/// A recording that can be launched.
pub(super) struct Graph {
    context: Arc<Context>,
    made: sys::CUgraphExec,
}

// SAFETY: graphs may be launched from any thread, one at a time, which the lock around them sees to.
unsafe impl Send for Graph {}

impl Graph {
    /// Ends the recording of a stream.
    pub fn end(stream: sys::CUstream, context: &Arc<Context>) -> Result<Self, CudaError> {
        let (mut graph, mut made) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: pointers are to live handles; the stream lives; the context is current. The graph is not needed once it is
        // made into one that can be launched.
        unsafe {
            call("cuStreamEndCapture", sys::cuStreamEndCapture(stream, &raw mut graph))?;
            let done = sys::cuGraphInstantiateWithFlags(&raw mut made, graph, 0);
            sys::cuGraphDestroy(graph);
            call("cuGraphInstantiate", done)?;
        }
        Ok(Self { context: context.clone(), made })
    }

    /// Launches it on a stream.
    pub fn launch(&self, stream: sys::CUstream) -> Result<(), CudaError> {
        // SAFETY: made in `end`; the stream lives; the context is current.
        call("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.made, stream) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: made once in `end`.
            unsafe { sys::cuGraphExecDestroy(self.made) };
        }
    }
}
