// SPDX-License-Identifier: Apache-2.0

// Package engines tests gpufence under the container engines that people have: containerd 1.7 and 2.x by
// ctr and by crictl, Docker, Podman with the runtime and with the hook, and no engine at all (`gpufence run`). Each is
// started in folders of its own, with the configuration that `gpufence install` wrote, beside a simgpud and a gpufenced;
// the same steps run on each, and what is refused must be refused in the same words. `make test-engines`
// runs it.
//
// The commands in docs/ are run here, too, or stand in a list with the reason why they cannot be.
//
// It needs root. What was started is stopped and unmounted at the end, and what was left is a failure.
package engines
