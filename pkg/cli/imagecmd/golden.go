package imagecmd

import (
	"io/fs"

	sessionizer "github.com/agent-sessionizer/agent-sessionizer"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/cli/app"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/config"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/golden"
	"github.com/agent-sessionizer/agent-sessionizer/pkg/vm"
)

// Golden returns the maker of golden images, saved states and standby VMs.
func Golden(a *app.App, driver vm.Driver) (*golden.Maker, error) {
	cfg, err := a.Settings()
	if err != nil {
		return nil, err
	}
	scripts, err := fs.Sub(sessionizer.Provision, "provision")
	if err != nil {
		return nil, err
	}
	images, err := app.Images(a)
	if err != nil {
		return nil, err
	}
	self, err := app.Self()
	if err != nil {
		return nil, err
	}
	// Images are built with the network access of a session without a profile.
	set, err := cfg.For("", "")
	if err != nil {
		return nil, err
	}
	reach, err := cfg.Policy(set, config.Additions{}, nil)
	if err != nil {
		return nil, err
	}
	reach.Enforced = true
	vms := golden.VMs{Driver: driver, Self: self}
	return &golden.Maker{
		VMs: vms, Images: images, Scripts: scripts, Template: images.Template, Policy: reach,
		Pool: golden.Pool{VMs: vms, Images: images, Dir: cfg.Paths.Pool(), Waiting: cfg.Pool},
	}, nil
}
