// SPDX-License-Identifier: Apache-2.0

package gpu

import "context"

// Sampler samples one GPU with a deadline.
type Sampler struct{}

// NewSampler makes the sampler of a GPU.
func NewSampler(d Device) *Sampler { panic("soon") }

// Sample asks for all lists and the memory. It returns when ctx ends at the latest, then with
// Err wrapping [ErrHung]; while a call of an earlier sample has not returned, it refuses at once
// with the same.
func (s *Sampler) Sample(ctx context.Context) Sample { panic("soon") }

// Open loads NVML through go-nvml; path "" means the loader's libnvidia-ml.so.1.
func Open(path string) Library { panic("soon") }
