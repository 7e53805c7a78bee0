// SPDX-License-Identifier: Apache-2.0

// Package guest holds the tests that run inside the guests of package vm.
package guest
