// SPDX-License-Identifier: Apache-2.0

// Package packages builds what `make package` makes, twice, and installs it: into a clean Debian, by
// upgrade, rollback, refusal and purge, as deb and as rpm, with processes that have the old library
// mapped as a container has it.
package packages
