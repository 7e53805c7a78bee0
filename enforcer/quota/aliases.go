// SPDX-License-Identifier: Apache-2.0

package quota

import (
	"math/big"
	"strconv"
	"strings"
)

// What others call a GPU memory limit. An alias is read only where no memory.max and no
// memory.min of ours is given, and bounds one container.
const (
	aliasPrefix   = "nvidia.com/container."
	aliasLimit    = ".gpu-memory.limit"
	aliasRequest  = ".gpu-memory.request"
	kaiMemory     = "gpu-memory"                  // MiB
	kaiFraction   = "gpu-fraction"                // of a GPU
	kaiContainer  = "gpu-fraction-container-name" // which container they mean
	kaiDevices    = "gpu-fraction-num-devices"    // read by the scheduler, harmless here
	nvidiaLimit   = "NVIDIA_GPU_MEMORY_LIMIT"     // MiB
	nvidiaRequest = "NVIDIA_GPU_MEMORY_REQUEST"
	hamiLimit     = "CUDA_DEVICE_MEMORY_LIMIT" // bytes, or with k, m, g; _<i> for one GPU
)

// EnvNames are the environment variables that gpufence reads where policy accepts them, and
// that are taken out of a fenced container in any case; a trailing * is a prefix. No other
// variable that a user or an image set is touched.
func EnvNames() []string {
	return []string{
		envPrefix + "*",
		"NVIDIA_GPU_MEMORY_*",
		hamiLimit + "*",
		"CUDA_DEVICE_MEMORY_SHARED_CACHE",
		"CUDA_DEVICE_SM_LIMIT*",
	}
}

// AnnotationPatterns are the annotations that [Ours] accepts, and no more than they need, as
// globs whose * does not cross a slash: what an engine has to hand on.
func AnnotationPatterns() []string {
	return []string{Domain + "*", aliasPrefix + "*", kaiMemory, kaiFraction + "*"}
}

// MatchEnv says whether a variable is one of [EnvNames].
func MatchEnv(name string) bool {
	for _, n := range EnvNames() {
		if prefix, ok := strings.CutSuffix(n, "*"); ok && strings.HasPrefix(name, prefix) || name == n {
			return true
		}
	}
	return false
}

// OurEnv picks the entries of env (NAME=value) that [EnvNames] covers, in order.
func OurEnv(env []string) []string {
	var out []string
	for _, e := range env {
		if name, _, _ := strings.Cut(e, "="); MatchEnv(name) {
			out = append(out, e)
		}
	}
	return out
}

// Ours says whether an annotation is one that we read, of our own or an alias.
func Ours(annotation string) bool {
	switch annotation {
	case kaiMemory, kaiFraction, kaiContainer, kaiDevices:
		return true
	}
	return strings.HasPrefix(annotation, Domain) || isContainerAlias(annotation)
}

// IsStatus says whether an annotation is one that gpufence writes and a user may not.
func IsStatus(annotation string) bool {
	key, ok := strings.CutPrefix(annotation, Domain)
	return ok && (key == statusPrefix || strings.HasPrefix(key, statusPrefix+"."))
}

func isContainerAlias(annotation string) bool {
	return strings.HasPrefix(annotation, aliasPrefix) &&
		(strings.HasSuffix(annotation, aliasLimit) || strings.HasSuffix(annotation, aliasRequest))
}

// aliases are the limits (max) and guarantees (min) that a container has by other names.
type aliases struct {
	max, min []listAmount
}

// annotationAliases reads the aliases that concern a container.
func annotationAliases(s Subject, hasGPU bool) (aliases, *Error) {
	var out aliases
	if s.Container != "" {
		for suffix, to := range map[string]*[]listAmount{aliasLimit: &out.max, aliasRequest: &out.min} {
			name := aliasPrefix + s.Container + suffix
			text, ok := s.Annotations[name]
			if !ok {
				continue
			}
			n, err := parsePlainQuantity(text)
			if err == nil && n < mib {
				err = NewError(CodeBelowContext, "%s is less than 1Mi", Quote(text)).WithHint("write a quantity such as 4Gi")
			}
			if err != nil {
				return out, at(cut(name), err)
			}
			*to = append(*to, listAmount{where: cut(name), text: text, all: Bytes(n)})
		}
	}
	if who := s.Annotations[kaiContainer]; who != "" && who != s.Container || who == "" && !hasGPU {
		// The scheduler gives the GPU to the first container where none is named, and only
		// to that one: having a GPU is how it is known here.
		return out, nil
	}
	if text, ok := s.Annotations[kaiMemory]; ok {
		n, err := parseMiB(text)
		if err != nil {
			return out, at(kaiMemory, err)
		}
		out.max = append(out.max, listAmount{where: kaiMemory, text: text, all: Bytes(n)})
	}
	if text, ok := s.Annotations[kaiFraction]; ok {
		a, err := parseFraction(text)
		if err != nil {
			return out, at(kaiFraction, err)
		}
		out.max = append(out.max, listAmount{where: kaiFraction, text: text, all: a})
	}
	return out, nil
}

// envAliases reads the aliases in the environment.
func envAliases(env map[string]string, names []string) (aliases, *Error) {
	var out aliases
	if text := env[nvidiaLimit]; text != "" {
		n, err := parseMiB(text)
		if err != nil {
			return out, at(nvidiaLimit, err)
		}
		out.max = append(out.max, listAmount{where: nvidiaLimit, text: text, env: true, all: Bytes(n)})
	}
	if text := env[nvidiaRequest]; text != "" {
		n, err := parseMiB(text)
		if err != nil {
			return out, at(nvidiaRequest, err)
		}
		out.min = append(out.min, listAmount{where: nvidiaRequest, text: text, env: true, all: Bytes(n)})
	}
	// Each GPU's own variable wins over the one for all; 0 means no limit there.
	all := Amount{}
	if text := env[hamiLimit]; text != "" {
		n, err := parseHAMi(text)
		if err != nil {
			return out, at(hamiLimit, err)
		}
		if n > 0 {
			all = Bytes(n)
			out.max = append(out.max, listAmount{where: hamiLimit, text: text, env: true, all: all})
		}
	}
	v := listAmount{where: hamiLimit, text: env[hamiLimit], env: true}
	for _, name := range names {
		index, ok := strings.CutPrefix(name, hamiLimit+"_")
		if !ok || env[name] == "" {
			continue
		}
		pos, convErr := strconv.ParseUint(index, 10, 10)
		if convErr != nil {
			return out, NewError(CodeBadList, "%s does not end in the number of a GPU", cut(name)).WithHint("write %s_0", hamiLimit)
		}
		n, err := parseHAMi(env[name])
		if err != nil {
			return out, at(name, err)
		}
		a := Bytes(n)
		if n == 0 {
			a = Amount{Kind: KindUnlimited}
		}
		v.list = append(v.list, listed{position: int(pos), amount: a})
		if v.text == "" {
			v.where, v.text = name, env[name]
		}
	}
	if len(v.list) > 0 {
		v.rest = all
		if all.Kind != KindNone {
			out.max = out.max[:len(out.max)-1]
		}
		out.max = append(out.max, v)
	}
	return out, nil
}

// parsePlainQuantity reads Kubernetes' notation as Kubernetes does: a bare number is bytes.
func parsePlainQuantity(text string) (uint64, *Error) {
	text = strings.TrimSpace(text)
	n, err := parseQuantity(text)
	if err == nil || err.Code != CodeNoUnit {
		return n, err
	}
	r, ok := new(big.Rat).SetString(text) // its form and length were checked
	if !ok || !r.IsInt() || !r.Num().IsUint64() || r.Num().Uint64() > maxQuantity {
		return 0, NewError(CodeFraction, "%s is not a whole number of bytes", Quote(text)).WithHint("write a quantity such as 4Gi")
	}
	return r.Num().Uint64(), nil
}

// parseMiB reads a whole number of MiB without a unit.
func parseMiB(text string) (uint64, *Error) {
	text = strings.TrimSpace(text)
	n, err := strconv.ParseUint(text, 10, 64)
	switch {
	case err != nil || text[0] == '+':
		return 0, NewError(CodeBadQuantity, "%s is not a whole number of MiB", Quote(text)).WithHint("write one such as 4096, without a unit")
	case n == 0:
		return 0, NewError(CodeBelowContext, "%s is no memory at all", Quote(text)).WithHint("write a number of MiB such as 4096")
	case n > maxQuantity/mib:
		return 0, NewError(CodeTooBig, "%s MiB is more than 2^63-1 bytes", Quote(text)).WithHint("write a number of MiB such as 4096")
	}
	return n * mib, nil
}

// parseFraction reads a part of a GPU, above 0 and at most 1.
func parseFraction(text string) (Amount, *Error) {
	text = strings.TrimSpace(text)
	bad := NewError(CodeBadPercent, "%s is not a part of a GPU", Quote(text)).WithHint("write one such as 0.5")
	if text == "" || len(text) > maxNumberLen || strings.Trim(text, "0123456789.") != "" {
		return Amount{}, bad
	}
	r, ok := new(big.Rat).SetString(text)
	if !ok || r.Sign() <= 0 || r.Cmp(big.NewRat(1, 1)) > 0 || !r.Denom().IsUint64() || r.Denom().Uint64() > maxShareDen {
		return Amount{}, bad
	}
	return Amount{Kind: KindShare, Num: r.Num().Uint64(), Den: r.Denom().Uint64()}, nil
}

// parseHAMi reads what HAMi's library reads: digits and at most one of k, m, g in either case,
// which are powers of 1024 there.
func parseHAMi(text string) (uint64, *Error) {
	text = strings.TrimSpace(text)
	num, shift := text, 0
	if text != "" {
		switch text[len(text)-1] {
		case 'k', 'K':
			num, shift = text[:len(text)-1], 10
		case 'm', 'M':
			num, shift = text[:len(text)-1], 20
		case 'g', 'G':
			num, shift = text[:len(text)-1], 30
		}
	}
	n, err := strconv.ParseUint(num, 10, 64)
	if err != nil || num[0] == '+' {
		return 0, NewError(CodeBadQuantity, "%s is not a number of bytes, or one with k, m or g", Quote(text)).WithHint("write one such as 3000m")
	}
	if n > maxQuantity>>shift {
		return 0, NewError(CodeTooBig, "%s is more than 2^63-1 bytes", Quote(text)).WithHint("write one such as 3000m")
	}
	return n << shift, nil
}
