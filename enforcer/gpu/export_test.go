// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"context"
	"fmt"

	"github.com/gpufence/gpufence/enforcer/monotonic"
)

// Sample asks and waits.
func (s *Sampler) Sample(ctx context.Context) Sample {
	bell := NewBell()
	defer bell.Close()
	if err := s.Ask(bell, false); err != nil {
		return s.Without(err, monotonic.Now())
	}
	for {
		if sample, there := s.Take(); there {
			return sample
		}
		select {
		case <-bell.C():
		case <-ctx.Done():
			return s.Without(fmt.Errorf("%w: %w", ErrHung, context.Cause(ctx)), monotonic.Now())
		}
	}
}

// Asked says whether a thread asks the device of a sampler that has been asked.
func (s *Sampler) Asked() bool {
	d, ours := s.device.(*device)
	return ours && d.asked != nil && !d.unable
}
