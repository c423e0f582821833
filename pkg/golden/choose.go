package golden

import (
	"context"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// From says what a session's VM was made from.
type From string

// The values of From.
const (
	FromGeneric From = "generic"
	FromGolden  From = "golden"
	FromWarm    From = "warm"
	FromPool    From = "pool"
	FromFork    From = "fork"  // another session; never chosen by Best
	FromSetup   From = "setup" // a saved setup of the repository; never chosen by Best
)

// Start describes the best starting point for a new session's VM.
type Start struct {
	Image vm.Image
	From  From
	Warm  image.Warm // if From is FromWarm
	// Standbys is the golden image whose standby VMs would be faster, if any exist (see
	// Pool.Take). Its name is empty otherwise.
	Standbys        image.Info
	MissingStandbys bool // whether preparing something would make the next session faster
}

// Best returns the fastest available starting point for a VM of that size.
func (m *Maker) Best(ctx context.Context, want config.Prepare, source, arch string, size Size) (Start, error) {
	generic := Start{From: FromGeneric, MissingStandbys: want != config.PrepareNone}
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
	made, err := m.Images.FindKey(image.Golden(source), arch, key)
	if err != nil {
		return generic, nil //nolint:nilerr // no current golden image exists
	}
	golden := Start{From: FromGolden}
	if golden.Image, err = made.Image(); err != nil {
		return generic, nil //nolint:nilerr // the golden image is damaged and will be rebuilt
	}
	if want == config.PrepareGolden {
		return golden, nil
	}
	_, state, err := m.saver(ctx, arch, size.CPUs, size.Memory)
	switch {
	case m.pools(want, err):
		golden.Standbys = made
		golden.MissingStandbys, err = m.Pool.missing(made, size)
		return golden, err
	case want != config.PrepareWarm || err != nil:
		return golden, nil //nolint:nilerr // VMs cannot be saved on this host, and no standby VMs are configured
	}
	golden.MissingStandbys = true
	w, ok := made.Warmed(state)
	if !ok {
		return golden, nil
	}
	img, err := made.Resumed(w)
	if err != nil {
		return golden, nil //nolint:nilerr // the saved state is damaged and will be made again
	}
	return Start{Image: img, From: FromWarm, Warm: w}, nil
}

// Distrust removes the saved state in dir because it could not be resumed. The next
// session that could use a saved state causes a new one to be made.
func (m *Maker) Distrust(dir string) error { return m.Images.Cool(dir) }
