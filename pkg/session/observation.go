package session

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/guestproto"
)

// Observation returns the keeper's last observation of the guest, and its time. It only reads
// a file. It returns fail.NotFound when the keeper has never taken an observation.
func Observation(p config.Paths, s Session) (guestproto.Observation, time.Time, error) {
	f, err := os.Open(p.Observation(s.ID))
	if errors.Is(err, fs.ErrNotExist) {
		return guestproto.Observation{}, time.Time{}, fail.New(fail.NotFound, "session %s has no observation yet", s.Name).WithHint("agent-sessionizer logs %s", s.Name)
	}
	if err != nil {
		return guestproto.Observation{}, time.Time{}, fail.New(fail.Host, "read observation of session %s: %w", s.Name, err)
	}
	defer f.Close()
	var g guestproto.Observation
	fi, err := f.Stat()
	if err == nil {
		err = json.NewDecoder(f).Decode(&g)
	}
	if err != nil {
		return guestproto.Observation{}, time.Time{}, fmt.Errorf("read observation of session %s: %w", s.Name, err)
	}
	return g, fi.ModTime(), nil
}
