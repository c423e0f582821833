package golden

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// From is what a session's VM was made from.
type From string

// The kinds of beginnings.
const (
	FromGeneric From = "generic"
	FromGolden  From = "golden"
	FromWarm    From = "warm"
	FromPool    From = "pool"
)

// Start is what a new session's VM is best made from.
type Start struct {
	Image vm.Image
	From  From
	Warm  image.Warm // if From is FromWarm
	// The golden image whose spares are faster, if there are any (Take); one
	// without a name otherwise.
	Spares image.Info
	Lacks  bool // whether making something would make the next one faster
}

// Best returns the fastest beginning there is for a VM of that size.
func (m *Maker) Best(ctx context.Context, want config.Prepare, source, arch string, size Size) (Start, error) {
	generic := Start{From: FromGeneric, Lacks: want != config.PrepareNone}
	from, err := m.Images.Find(source, arch)
	if err != nil {
		return Start{}, err
	}
	if generic.Image, err = m.Images.Lookup(source, arch); err != nil || want == config.PrepareNone {
		return generic, err
	}
	key, err := m.Key(from)
	if err != nil {
		return Start{}, err
	}
	made, err := m.Images.Find(image.Golden(source), arch)
	if err != nil || made.Key != key {
		return generic, nil //nolint:nilerr // there is none
	}
	golden := Start{From: FromGolden}
	if golden.Image, err = made.Image(); err != nil {
		return generic, nil //nolint:nilerr // it is damaged, and made anew
	}
	if want == config.PrepareGolden {
		return golden, nil
	}
	_, state, err := m.saver(ctx, arch, size.CPUs, size.Memory)
	switch {
	case m.pools(want, err):
		golden.Spares = made
		golden.Lacks, err = m.lacksSpares(made, size)
		return golden, err
	case want != config.PrepareWarm || err != nil:
		return golden, nil //nolint:nilerr // VMs cannot be saved here, and none are to wait
	}
	golden.Lacks = true
	w, ok := made.Warmed(state)
	if !ok {
		return golden, nil
	}
	img, err := made.Resumed(w)
	if err != nil {
		return golden, nil //nolint:nilerr // it is damaged, and made anew
	}
	return Start{Image: img, From: FromWarm, Warm: w}, nil
}

// Distrust removes the saved state in a directory, which could not be resumed.
// The next session that wants one has it made anew.
func (m *Maker) Distrust(dir string) error { return m.Images.Cool(dir) }
