"""Citations of papers on which several strategies are based, for reports. Each method also names its sources in its file."""

GAN_2021 = "Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, VLDB 2021, arXiv:2107.01499"
JIANG_2020 = "Jiang et al., BytePS, OSDI 2020"
KIM_2019 = "Kim et al., Parallax, EuroSys 2019, arXiv:1808.02621"
LI_2020 = (
    "Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020, arXiv:2006.15704"
)
LIAN_2017 = (
    "Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017, arXiv:1705.09056"
)
PENG_2019 = "Peng et al., ByteScheduler, SOSP 2019"
RAJBHANDARI_2020 = (
    "Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models, SC 2020, "
    "arXiv:1910.02054"
)
STICH_2018 = "Stich et al., Sparsified SGD with Memory, NeurIPS 2018, arXiv:1809.07599"
TANG_2021 = "Tang et al., 1-bit Adam, ICML 2021, arXiv:2102.02888"
