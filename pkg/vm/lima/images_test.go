package lima

import (
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Before its first start a VM names the image only in its configuration; later its
// disks are links to the image.
func TestImageUsers(t *testing.T) {
	home, images := t.TempDir(), t.TempDir()
	dir := filepath.Join(images, "debian-x86_64-0123456789ab-1")
	for _, d := range []string{dir, dir + "2", filepath.Join(home, "new"), filepath.Join(home, "started"), filepath.Join(home, ".half~new-1"), filepath.Join(home, "copied")} {
		if err := os.Mkdir(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for file, text := range map[string]string{
		filepath.Join(home, "new", "lima.yaml"):         "images:\n- location: " + dir + "/disk.qcow2\n",
		filepath.Join(home, ".half~new-1", "lima.yaml"): "images:\n- location: " + dir + "/disk.qcow2\n",
		filepath.Join(home, "copied", "lima.yaml"):      "images:\n- location: " + dir + "2/disk.qcow2\n",
		filepath.Join(home, "copied", "basedisk"):       dir + "/",
		filepath.Join(home, "file"):                     "",
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Join(dir, "disk.qcow2"), filepath.Join(home, "started", "basedisk")); err != nil {
		t.Fatal(err)
	}
	users, err := ImageUsers(home, dir)
	if slices.Sort(users); err != nil || !slices.Equal(users, []string{"half", "new", "started"}) {
		t.Errorf("ImageUsers = %q, %v, want half, new, started", users, err)
	}
	if users, err := ImageUsers(filepath.Join(home, "none"), dir); err != nil || len(users) != 0 {
		t.Errorf("ImageUsers of a missing home = %q, %v, want none", users, err)
	}
}
