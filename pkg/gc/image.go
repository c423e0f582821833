package gc

import (
	"context"
	"path/filepath"
	"slices"

	"github.com/agent-sessionizer/agent-sessionizer/pkg/fail"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/image"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/session"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm/lima"
)

// RemoveImage removes an image. It refuses if a session's disk is backed by the image, or is
// about to be, and reports by say which VMs use it.
func RemoveImage(ctx context.Context, sessions *session.Manager, images *image.Store, name string, say func(format string, args ...any)) error {
	all, err := sessions.List(ctx)
	if err != nil {
		return err
	}
	for _, s := range all {
		if image.SourceName(s.Spec.Image) == name && !s.Status.WasReady {
			return fail.New(fail.Conflict, "session %s is being created from image %s", s.Name, name).WithHint("agent-sessionizer list")
		}
	}
	return images.Remove(name, ImageInUse(sessions.Config.Paths.LimaHome, say))
}

// ImageInUse returns a function that reports whether disks of VMs are backed by an image's
// directory. It ignores the doomed VMs. A wrong no would destroy a disk, so an error counts
// as use.
func ImageInUse(limaHome string, say func(format string, args ...any), doomed ...string) func(dir string) bool {
	return func(dir string) bool {
		users, err := lima.ImageUsers(limaHome, dir)
		users = slices.DeleteFunc(users, func(name string) bool { return slices.Contains(doomed, name) })
		for _, name := range users {
			say("%s is based on %s", name, filepath.Base(dir))
		}
		if err != nil {
			say("%v", err)
		}
		return err != nil || len(users) > 0
	}
}
