// SPDX-License-Identifier: Apache-2.0

package process

import (
	"context"
	"fmt"
	"net"
	"strings"
)

// Says is a probe for [Process.Ready]: the process has said a text.
func (p *Process) Says(text string) func(context.Context) error {
	return func(context.Context) error {
		if !strings.Contains(p.Said(), text) {
			return fmt.Errorf("it has not said %q", text)
		}
		return nil
	}
}

// Answers is a probe for [Process.Ready]: somebody listens at an address. The socket of one that has died refuses.
func Answers(network, address string) func(context.Context) error {
	return func(ctx context.Context) error {
		c, err := new(net.Dialer).DialContext(ctx, network, address)
		if err != nil {
			return err
		}
		return c.Close()
	}
}
